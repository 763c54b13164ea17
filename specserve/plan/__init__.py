"""The costs of a run, worked out on paper before it begins: from a config.json and a table of devices, with nothing
loaded. One vocabulary serves training and serving: the bytes that a device holds, the FLOPs that it computes, the bytes
that it reads and the bytes that it sends. Read `work` first (bytes held, and the work of a served step), then
`steady_state` and `serving` (a fleet under a load), or `activations`, `collectives`, `training` and `outline` (a
training run)."""
