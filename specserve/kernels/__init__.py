"""Arrays in, arrays out: what models and steps compute with, without knowing any model.

Read `attention` first, the only way to attend, then `pages` (where keys and values lie) and `paged` (how a backend
reads them: `paged_gpu`, `paged_tpu`). `rows` and `anchors` attend in packed training rows, and `recurrence` keeps a
state in place of keys. `matmul` multiplies stored and quantised matrices, `grouped` and its two kernels run experts,
`rowwise` acts on one token at a time, and `match` finds the end of a text earlier in it. `native` is the optional C++
for CPUs. `reference` has the plain twins that tests compare with.
"""
