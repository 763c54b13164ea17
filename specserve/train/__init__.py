"""Training of draft heads. Read `step` first, the program of a training step, with its losses (`chunked_loss`,
`losses`, `teachers`) and optimiser; then `learner`, which runs it over batches, and `trainer`, a whole run.
`acceptance` measures heads by the code that serves, `features` and `capture` keep the target's states on disk. `run/`
has the parts of a run around the trainer, `remote/` targets and workers in other processes."""
