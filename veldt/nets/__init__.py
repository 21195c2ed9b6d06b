"""Networks: torsos for vectors and images (`heads`, `conv`), the LSTM (`recurrent`), heads (`heads`), and which of them an
environment gets (`make`). Integers become floats here; uint8 is scaled to [0, 1].

It may import `veldt.records`, `veldt.errors` and `veldt.callables`.
"""
