"""The formats of answers: calls of tools, and reasoning. Read `reader`, then `objects` (some formats; `named`, `tagged`
and `notated` have the others, over `schemas` and `written`), `tools` (the list of all), `probe` (the choice of one),
`grammars` (the demand for one), `prompted` (chats whose template lacks some) and `reasoning` (a model's syntax)."""
