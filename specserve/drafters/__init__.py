"""Drafters, which propose the tokens that the target verifies: a folder for each kind, with networks only.

Read `speculative/drafter.py` for what serving calls, then `interface` and `learning` for what training calls, then
`registry`, which has a line for each kind. `follow` and `grow` are the state and the trees that most kinds share, and
`speculation` reads the spellings of trees. docs/add-a-drafter.md adds a kind step by step. The files that other engines
write are in `specserve.interop`.
"""
