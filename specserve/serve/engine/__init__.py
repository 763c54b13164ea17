"""Continuous batching on one thread.

Read `engine` (the thread, and what other threads may call), `input_processor` and `admission` (requests on their way to
it), `rounds` (dispatch and read), `scheduler` and `pages` (slots, pages and the prefix cache), `step_choice` (the next
step), `delivery` (tokens to listeners), `late` (programs that are compiled while it serves), `swap` (another head).
docs/timeline.md draws how rounds overlap.
"""
