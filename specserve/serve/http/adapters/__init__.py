"""Other APIs than OpenAI's completions and chat: Responses, Anthropic's Messages and SGLang's /generate. Each body
becomes one of `openai/bodies`, and each has a format of its own for the replies. `translation` has what they share."""
