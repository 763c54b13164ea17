"""Measurements of heads, engines and servers: all that needs the trainer and the engine together.

`evaluation` is `specserve eval`, over the conversations of `acceptance` and the questions of `prompts`; `remote`,
`client` and `series` ask servers, `report` makes the tables. `bench` has
the benchmarks, `verify` the proof that speculation changes no token, and `trial` runs a head for the doctor of heads.
"""
