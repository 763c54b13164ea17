"""Requests and answers as host data. Read `request` (options, requests and deltas), `output` (tokens to text),
`completion` (whole answers), `grammars` (token masks)."""
