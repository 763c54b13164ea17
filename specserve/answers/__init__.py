"""The target's own answers as training data. Read `regenerate` first, which has an engine answer the questions of a
data set (`questions`) and writes the rows (`row_file`) with an account of them; then `cache`, the first stage of a
training run, and `ray_engines`, which has many engines answer."""
