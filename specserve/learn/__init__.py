"""A draft head that learns from what its server answers (`specserve serve --learn`).

Read `traffic` (the kept tokens of answers), `selection` (those of a round, and the clients' shares), `task` and `round`
(training from the served head, and the judgement of the result), `learner` (the process that makes a round), `versions`
(heads that served, and which one does) and `live` (tau of each while it serves); then `learning`, which joins them.
"""
