"""The HTTP server: OpenAI's API and others, over any engine that keeps to `serve/engine/interface.py`.

To read it in the order in which a request crosses it: a connection (`transport/connections`) hands it to the guard
(`transport/guard`) around the routes of `app`. `service` reads its body (`openai/bodies`), makes token ids of it
(`openai/prompts`) and finds how the answer is to be read (`formats/reasoning`): a `Work`. A `Generation`
(`openai/streaming`) submits that and collects the engine's deltas. `formats/reader` finds reasoning and calls in their
text, and `openai/completions` spells the reply. All else is beside this path:

- `transport/`: the socket, the connection, the guard, threads, and JSON as it is read and written;
- `openai/`: bodies and replies of OpenAI's completions and chat;
- `formats/`: the syntax of models' answers, and grammars that demand it;
- `adapters/`: other APIs, whose bodies become bodies of `openai/`;
- `admin/`: state, metrics, the draft head, and the description of the API;
- `page/`: the page at /.
"""
