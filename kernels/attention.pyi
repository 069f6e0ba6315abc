from typing import Any

from numpy.typing import NDArray

_Array = NDArray[Any]

def causal_attention(qkv: _Array, y: _Array, heads: int, *, threads: int = 1) -> None: ...
def causal_attention_backward(
    dy: _Array, qkv: _Array, dqkv: _Array, heads: int, *, threads: int = 1
) -> None: ...
