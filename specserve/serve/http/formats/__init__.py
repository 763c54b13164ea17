"""The syntax of models' answers. `reader` takes an answer apart while it arrives; `reasoning` and `tools` have the
formats that it reads by, chosen from the chat template; `grammars` make a model keep to them."""
