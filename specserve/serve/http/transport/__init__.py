"""The way between the socket and the routes. `server` takes the port and the signals; `connections` is a connection of
uvicorn's with limits; `guard` gives ids and checks hosts, keys and sizes; `errors` has the shape of errors. Beside
them: `keys`, `threads` for long work, `json_codec` and `tracing`."""
