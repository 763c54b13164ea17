"""A draft that is a language model of its own, smaller than the target. `drafter` is all of it."""
