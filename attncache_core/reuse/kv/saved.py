"""Open the saved blocks that continue what memory has of some sequences.

sequences, and the blocks that a batch has claimed -> the whole blocks behind each other that are saved
    -> the names of the shorter blocks that may follow, which are asked for next
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import takewhile

from attncache_core.reuse.kv.blocks import BLOCK_TOKENS, BlockName
from attncache_core.reuse.kv.memory import PrefixKey
from attncache_core.reuse.kv.transfer import SavedBlock, Transfers


def open_whole_blocks(
    transfers: Transfers,
    sequences: Sequence[PrefixKey],
    claimed: Container[bytes],
    memory: Container[bytes],
    token_bytes: int | None,
) -> tuple[dict[bytes, SavedBlock], list[list[BlockName]]]:
    """Open the whole blocks at the front of sequences that are claimed and saved, by key.

    Returns also, for each sequence, the names of the blocks of fewer tokens that may follow, the longest
    first. claimed, memory: the keys of blocks. token_bytes: see Transfers.open.
    """
    found = transfers.open([_worth_opening(each, claimed, memory) for each in sequences], token_bytes)
    opened: dict[bytes, SavedBlock] = {}
    choices = []
    for sequence in sequences:
        parent, walked = sequence.root, 0
        for name in sequence.names[: sequence.max_given // BLOCK_TOKENS]:
            if name.key not in opened and name.key not in memory:
                if (file := found.pop(name.key, None)) is None:
                    break
                opened[name.key] = file
            parent, walked = name.key, walked + BLOCK_TOKENS
        short = (sequence.short_block(parent, walked, length) for length in range(BLOCK_TOKENS - 1, 0, -1))
        choices.append([name for name in short if name])
    for file in found.values():
        file.close()
    return opened, choices


def _worth_opening(
    sequence: PrefixKey, claimed: Container[bytes], memory: Container[bytes]
) -> list[BlockName]:
    """Return the names of the claimed whole blocks at the front of a sequence."""
    front = takewhile(
        lambda name: name.key in claimed or name.key in memory,
        sequence.names[: sequence.max_given // BLOCK_TOKENS],
    )
    return [name for name in front if name.key in claimed]
