"""The parts of a run around the trainer: its settings by target (`recipe`) and their checks, its folder, the way to a
trainer (`prepare`), its time (`budget`), and those that watch it (`observers`, `trackers`, `report` with its
`page`)."""
