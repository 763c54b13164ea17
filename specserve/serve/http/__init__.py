"""The HTTP server: OpenAI's API and others, over any engine that keeps to `serve/engine/interface.py`.

To read it in the order in which a request crosses it: `app` has the routes behind the layers of `transport/guard`;
`openai/routes` reads a body by `openai/bodies`; `service` makes it the prompts and options of a `Work`;
`openai/streaming` submits them and collects the engine's deltas; `formats/reader` finds reasoning and calls in their
text; and `openai/completions` spells the reply. All else is beside this path:

- `transport/`: the socket, the connection, the guard, threads, and JSON as it is read and written;
- `openai/`: bodies and replies of OpenAI's completions and chat;
- `formats/`: the syntax of models' answers, and grammars that demand it;
- `adapters/`: other APIs, whose bodies become bodies of `openai/`;
- `admin/`: state, metrics, the draft head, and the description of the API;
- `page/`: the page at /.
"""
