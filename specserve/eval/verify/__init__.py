"""The proof that speculation changes no token, on any target and head. Read `rule` first (the token that the target
itself would have drawn), then `judge` (a tie or a bug), `asker` (the engines that answer), and `proof`, which runs all
checks."""
