"""Networks. Integers become floats here; uint8 is scaled to [0, 1].

    make.py        which torso an environment gets
    heads.py       the MLP torso, and heads
    conv.py        torsos for images
    recurrent.py   the LSTM
    tensors.py     arrays to tensors

May import records, `errors` and `callables`.
"""
