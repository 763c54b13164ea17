"""The way from data sets to batches, on the host alone.

In the order of the data: `sources` (with `conversations`, the rows' own formats, and `pydoc`, the bundled source),
`documents` (with `chat_masks`: the tokens that bear loss), `token_cache`, `packing`, `dataset`, which puts these
together, and `loader`."""
