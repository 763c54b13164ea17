"""OpenAI's completions and chat. Bodies: `fields` has the rules, `chat` messages and tools, `bodies` all of them
together. `prompts` makes token ids of a body, `streaming` runs them on the engine. Replies: `replies` has the material
of all formats, `logprobs` single tokens, `completions` the two formats. `tokenizer` has the routes of a tokenizer."""
