"""The files of heads: written and read in the layouts of other engines, examined, repaired.

`formats` has a line for each kind; `format.HeadFormat` is what such a line does, and the plain format of kinds that
have none. `head` saves and loads, `convert` exports and imports. `keys` reads a config.json by the table of the keys
that a kind knows (`harmless.txt` lists those of which nothing follows). `bundled` finds heads by name, `gguf` shows one
of llama.cpp's as a folder. The draft doctor is `doctor` with `findings`, `examined` and `repairs`; `faults.txt` is the
table of all that it reports. A folder for each family has its dialects, its checks and its files.
"""
