"""The compiled programs and the state that they run over.

Read `runner` (what the engine calls), `shapes` and `program_list` (the programs that there are), `batches` (the rows of
slots), `inputs` and `calls` (their arguments and functions), `compile_queue`, `compiling_process` and
`program_cache` (compiling ahead, beside a server, and files of compiled programs), `calibrate` (what steps cost here).
"""
