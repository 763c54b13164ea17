"""The values that the sampler's options may have, defined once for settings and requests. Imports no JAX."""

from typing import Annotated

from pydantic import Field

LARGEST = 2**31 - 1  # of an int32, in which the compiled step takes numbers of tokens
Temperature = Annotated[float, Field(ge=0, le=100)]  # 0 is greedy
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=LARGEST)]  # 0 or -1: off
MinP = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=100)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST)]
NumTokens = Annotated[int, Field(ge=0, le=LARGEST)]
