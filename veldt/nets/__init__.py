"""Networks. Integers become floats here; uint8 is scaled to [0, 1].

    normalize.py  running mean and deviation of vectors
    torsos.py     observations to features: the MLP, torsos for images, and which of them an environment gets
    networks.py   on a torso: heads, the LSTM, and networks that have one

May import records, `errors` and `callables`.
"""
