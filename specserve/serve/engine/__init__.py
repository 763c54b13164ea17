"""Continuous batching on one thread.

Read `engine` (the thread, and what other threads may call), `input_processor` and `admission` (requests on their way to
it), `rounds` (dispatch and read), `sequence` (what is served), `scheduler` and `pages` (slots, pages and the prefix
cache), `state_places` and `windows` (what some layers keep in place of all tokens), `step_choice` (the next step),
`delivery` (tokens to listeners), `late` (programs that are compiled while it serves), `swap` (other weights),
`adapters` (LoRA).
docs/timeline.md draws how rounds overlap.
"""
