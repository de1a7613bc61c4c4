"""Why u*u - v*v with a small start recovers sparse noise: section 3 of the paper, as commands with figures.

The network is replaced by a linear model, y = J theta + s: few labels are wrong (s is sparse), and J has a low rank. A
file is one experiment (implicit_bias, effect_of_lambda, phase, landscape, visits), or a part that they share. Of the
trainer only `visits` uses anything: the noise table itself.
"""
