"""Texts that lose tokens at their beginning if they are too long."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attncache_core import InputTooLong, InvalidInput, PrefillEngine
from attncache_core.checkpoints.template import Text
from attncache_core.text.limits import max_characters, too_many
from attncache_core.text.prompts import Prompt
from attncache_core.text.tokenizer import TextTokenizer, continued
from service.errors import rename

# Of a text that is cut, this many characters per token are tokenised, and more if it has fewer tokens.
_CHARACTERS_PER_TOKEN = 16
# The first characters decide how the template's prefix ends. Those behind a cut may have other tokens than in
# the whole text, because a cut changes the tokens of the word that it cuts, and perhaps of the next words.
_FIRST_CHARACTERS = 256
# Where another word begins, or stands between two different letters of a script that may have no spaces.
_BORDER = re.compile(r"\s(?=\S)|([^\W\d_a-zA-Z])(?!\1)(?=[^\W\d_a-zA-Z])")


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
        ids = _last_tokens(engine.tokenizer, text, prompt, f"inputs[{index}]")
    except InvalidInput as error:
        rename(error, f"inputs[{index}]" if error.field == "inputs[0]" else error.field)
        raise
    return continued([ids], prompt.sequence_plans)


def _last_tokens(tokenizer: TextTokenizer, text: str, prompt: Prompt, field: str) -> list[int]:
    """Return the tokens of a text that is too long in its prompt, without tokenising more than needed.

    Raises InputTooLong if the text would have to be tokenised beyond `max_characters`.
    """
    size, most = _CHARACTERS_PER_TOKEN * tokenizer.max_tokens, max_characters(tokenizer.max_tokens)
    while size < min(len(text), most):
        start = len(text) - size
        # A long run, such as a number, may be divided from its own beginning on: words have borders.
        border = _BORDER.search(text, start, start + size // 4)
        if border or (4 * size >= most and len(text) > most):
            ends = text[:_FIRST_CHARACTERS] + text[border.end() if border else start :]
            ids, cut = tokenizer.cut_at_beginning(ends, prompt, field)
            if cut >= 2 * _FIRST_CHARACTERS:
                return ids
        size *= 4
    return tokenizer.cut_at_beginning(text, prompt, field)[0]
