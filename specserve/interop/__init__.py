"""The files of heads: written and read in the layouts of other engines, examined, repaired.

`formats` has a line for each kind; `format.HeadFormat` is what such a line does, and the plain format of kinds that
have none. `head` saves and loads, `convert` exports and imports. `keys` reads a config.json by the table of the keys
that a kind knows. `bundled` finds the heads that ship. The draft doctor is `doctor` with `findings`, `examined` and
`repairs`. A folder for each family has its dialects, its checks and its repairs.
"""
