"""Continuous batching on one thread.

Read `engine` (the thread, and what other threads may call), `rounds` (dispatch and read), `scheduler` and `pages`
(slots, pages and the prefix cache), `step_choice` (the next step), `delivery` (tokens to listeners), `swap` (another
head). docs/timeline.md draws how rounds overlap.
"""
