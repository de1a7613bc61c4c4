"""Why u*u - v*v with a small initial value recovers sparse noise: section 3 of the paper, as commands with figures.

A linear model replaces the network: y = J theta + s, where few labels are wrong (s is sparse) and J has a low rank.
Each of implicit_bias, effect_of_lambda, phase, landscape and visits is one experiment; the other files are shared
between them. Only `visits` uses a part of the trainer: the noise table.
"""
