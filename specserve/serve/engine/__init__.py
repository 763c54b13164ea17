"""Continuous batching on one thread. Read `engine` (the thread, and what other threads may call), `rounds` (dispatch and
read), `scheduler` and `pages` (slots, pages and the prefix cache), `step_choice` (which step next), `delivery` (tokens to
listeners), `swap` (another head). docs/timeline.md draws how rounds overlap."""
