"""Texts that lose tokens at their beginning if they are too long."""

from __future__ import annotations

from collections.abc import Sequence

from attncache_core import InputTooLong, InvalidInput, PrefillEngine
from attncache_core.checkpoints.template import Text
from attncache_core.text.limits import max_characters, too_many
from attncache_core.text.prompts import Prompt
from attncache_core.text.tokenizer import continued

# Of a text that is cut, this many characters per token are tokenised, and more if it has fewer tokens.
_CHARACTERS_PER_TOKEN = 16
# A cut changes the tokens of the word that it cuts. Longer words have the same tokens nearly to their start.
_FIRST_CHARACTERS = 256


def cut_left(
    engine: PrefillEngine, texts: Sequence[Text], prompt: Prompt, max_total_tokens: int
) -> list[Sequence[int]]:
    """Return the sequences of texts in a prompt, as engine.tokenize does, cut at their beginning.

    The tokens of the text are cut, and those of the prompt never. Raises InvalidInput for a pair, and
    InputTooLong if all sequences have more than `max_total_tokens` tokens together, or if a text has many
    characters and few tokens; see TextTokenizer.turns.
    """
    sequences: list[Sequence[int]] = []
    tokens = 0
    for index, text in enumerate(texts):
        if isinstance(text, tuple):
            raise InvalidInput(
                "truncation_direction left is not accepted for pairs, which are cut at their end",
                field="truncation_direction",
            )
        of_text = _sequences(engine, text, prompt, index)
        tokens += sum(map(len, of_text))
        if tokens > max_total_tokens:
            raise too_many(tokens, max_total_tokens, "inputs")
        sequences += of_text
    return sequences


def _sequences(engine: PrefillEngine, text: str, prompt: Prompt, index: int) -> Sequence[Sequence[int]]:
    """Return the sequences of text `index`, one per plan of the prompt."""
    try:
        return engine.tokenize([text], False, prompt)
    except InputTooLong:
        frame = engine.tokenizer.frame(prompt)
    last = _last_tokens(engine, text, frame.room, f"inputs[{index}]")
    return continued([frame.around(last)], prompt.sequence_plans)


def _last_tokens(engine: PrefillEngine, text: str, count: int, field: str) -> list[int]:
    """Return the ids of the last tokens of a text, without tokenising more of the text than needed.

    Raises InputTooLong if the text would have to be tokenised beyond `max_characters`.
    """
    size = _CHARACTERS_PER_TOKEN * count
    while size < min(len(text), max_characters(count)):
        [pieces] = engine.tokenizer.pieces([text[-size:]], special=False)
        if len(pieces) >= count and (pieces[-count].start or 0) >= _FIRST_CHARACTERS:
            return [piece.id for piece in pieces[-count:]]
        size *= 4
    [ids] = engine.tokenizer.turns([text], field)
    return ids[-count:]
