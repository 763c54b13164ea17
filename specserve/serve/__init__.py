"""The server: a request's way from HTTP to the device and back.

Read `requests` (questions and answers as data), then `engine` (the order of work), `programs` (the work on the device)
and `launch` (how a server is put together from `settings`). `http` is the endpoint, `fleet` is several processes or
replicas as one server, and `llm` is the same engine for offline batches.
"""
