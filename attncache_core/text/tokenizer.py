"""Turn texts into token sequences, exactly as the library that made the checkpoint does.

The number of characters that a request may give to the tokenizer is bounded. The bounds are checked before
the tokenizer runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer

from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.checkpoints.hugging_face import loading
from attncache_core.checkpoints.template import Template
from attncache_core.errors import InputTooLong, InvalidInput, UnsupportedModel
from attncache_core.text.prompts import Frame, Prompt, SequencePlan

# transformers reports a limit of 10^30 tokens for a tokenizer without a limit.
_NO_LIMIT = 10**9
# A sample text, for questions about a template whose answer does not depend on the text.
_ANY_TEXT = "text"
# Texts whose first tokens differ, also where a tokenizer joins a token with the text before it.
_DIFFERENT_TEXTS = ("text", "7", "(", " a", "\n")
# A text with more characters per allowed token is refused before tokenisation. Prose has fewer on average.
_CHARACTERS_PER_TOKEN = 16
# A tokenizer takes up to 430 bytes per character while it works, so it gets at most this many at a time.
_CHARACTERS_AT_ONCE = 2**18
# Limits for all labels of a request together. The text around a label is tokenised once per label, so this
# many characters take half a second. A token of a label takes 160 bytes until the request is answered.
_MOST_LABEL_CHARACTERS = 2**20
_MOST_LABEL_TOKENS = 2**16


class TextTokenizer:
    """A fast tokenizer that applies the checkpoint's template, lowercasing and length limit. Thread safe."""

    def __init__(self, checkpoint: Checkpoint, max_tokens: int | None = None) -> None:
        """Load the tokenizer of a checkpoint.

        max_tokens: the longest sequence in tokens, if that is less than the model's own limit.
        Raises UnsupportedModel if the model folder has no fast tokenizer or its files cannot be read, and
        InvalidInput if the checkpoint's template leaves no room for a text.
        """
        if not checkpoint.vocabularies:
            # transformers would create a tokenizer with an empty vocabulary.
            raise UnsupportedModel(f"model folder {checkpoint.folder} has no tokenizer.json", field="model")
        with loading(f"the tokenizer of model {checkpoint.name}"):
            loaded = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
        if not loaded.is_fast:
            raise UnsupportedModel(
                f"model {checkpoint.name} has no fast tokenizer (tokenizer.json)", field="model"
            )
        limits = [
            checkpoint.max_tokens or loaded.model_max_length,
            checkpoint.position_limit or _NO_LIMIT,
            max_tokens or _NO_LIMIT,
        ]
        self.max_tokens = int(min(limits))
        self._tokenizer: Tokenizer = loaded.backend_tokenizer
        if checkpoint.lowercase:
            # The tokenizer lowercases, because str.lower() would also change special tokens in a text.
            own = [self._tokenizer.normalizer] if self._tokenizer.normalizer else []
            self._tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
        self._tokenizer.no_padding()
        # This class truncates texts itself, because the tokenizer would cut off the template's end.
        self._tokenizer.no_truncation()
        self.default_prompt = self.prompt(checkpoint.template)

    def prompt(self, template: Template, *, field: str = "template", continuation_tokens: int = 0) -> Prompt:
        """Prepare a template for this tokenizer.

        field: the name of the template in error messages.
        continuation_tokens: the most tokens that will follow a text in the template.
        Raises InvalidInput if no room is left for a text. The error names `field` if the template is too
        long, and "labels" if the continuation is too long.
        """
        self._require_short(template.prefix + template.suffix, field)
        if template != Template() or continuation_tokens:
            taken = len(self._tokenizer.encode(template.around("")).ids)
            if taken >= self.max_tokens:
                raise _no_room(self.max_tokens, field)
            if taken + continuation_tokens >= self.max_tokens:
                raise _no_room(self.max_tokens, "labels")
        return Prompt(template, (SequencePlan(self._front_tokens(template.prefix)),))

    def front(self, template: Template) -> list[int]:
        """Return the token ids that texts in a template begin with.

        A token may span the end of the template's prefix and a text, so these may be fewer tokens than the
        prefix alone has. Raises InvalidInput if the template has no prefix, or leaves no room for a text.
        """
        self.prompt(template)
        if not template.prefix:
            raise InvalidInput("template has no text in front of {}", field="template")
        sequences = [self._tokenizer.encode(template.around(text)).ids for text in _DIFFERENT_TEXTS]
        columns = zip(*sequences, strict=False)
        front = [column[0] for column in takewhile(lambda tokens: len(set(tokens)) == 1, columns)]
        if not front:
            raise InvalidInput("the text in front of {} in template is no token of its own", field="template")
        return front

    def tokenize(
        self,
        texts: Sequence[str],
        *,
        truncate: bool,
        prompt: Prompt | None = None,
        most_tokens: int | None = None,
    ) -> list[list[int]]:
        """Return the token ids of each text in its template: for each text, one sequence per sequence plan.

        A sequence has at most `max_tokens` tokens: a text that is too long loses tokens at its end. The
        template, the plan's continuation and the special tokens of the sequence are never cut.
        prompt: by default the checkpoint's template.
        most_tokens: a limit for all sequences together.
        Raises InputTooLong, which names the text, if a text is too long and `truncate` is False. Raises
        InputTooLong also if all sequences have more than `most_tokens` tokens together. The error is raised
        before tokenisation if the template alone has too many characters for this many texts.
        """
        prompt = prompt or self.default_prompt
        template, plans = prompt.template, prompt.sequence_plans
        if most_tokens is not None:
            _require_few_characters(template, len(texts), most_tokens)
        room = self.max_tokens - max(len(plan.continuation) for plan in plans)

        def of_texts() -> Iterator[list[int]]:
            for index, ids in enumerate(self._encoded(template.around(text) for text in texts)):
                if len(ids) > room and not truncate:
                    raise InputTooLong(
                        f"the text has more than {room} tokens; shorten the text or allow truncation",
                        field=f"inputs[{index}]",
                    )
                yield ids if len(ids) <= room else self._cut(texts[index], template, len(ids) - room)

        return continued(of_texts(), plans, most_tokens)

    def turns(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text by itself, without a template and without special tokens.

        The tokens of a text do not depend on the texts around it, so they stay the same in a conversation
        that grows. A text may have no token.
        """
        return list(self._encoded(texts, special=False))

    def frame(self, prompt: Prompt) -> Frame:
        """Return the tokens that a prompt puts around the tokens of `turns`.

        Raises InvalidInput if the prompt leaves no room.
        """
        template, sample = prompt.template, self._tokenizer.encode(_ANY_TEXT)
        own = [index for index, special in enumerate(sample.special_tokens_mask) if not special]
        prefix, suffix = self.turns([template.prefix, template.suffix])
        before, after = [*sample.ids[: own[0]], *prefix], [*suffix, *sample.ids[own[-1] + 1 :]]
        continuation_tokens = max(len(plan.continuation) for plan in prompt.sequence_plans)
        room = self.max_tokens - len(before) - len(after) - continuation_tokens
        if room < 1:
            raise _no_room(self.max_tokens, "template")
        return Frame(before, after, room)

    def require_open_end(self) -> None:
        """Raise UnsupportedModel if the tokenizer ends every text with a special token, before any label."""
        if self._tokenizer.encode(_ANY_TEXT).special_tokens_mask[-1]:
            raise UnsupportedModel(
                "the tokenizer ends every text with a special token, so no label can follow a text",
                field="model",
            )

    def continuations(self, template: Template, labels: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token ids that each label adds after a text in this template.

        A space separates the label from the template, unless the template ends in white space.
        Raises InvalidInput if a label adds no token of its own, or if the template or a label leaves no room
        for a text; the error names the template or the label. Raises InputTooLong if the labels have too many
        tokens, or so many characters together with the template that they are refused before tokenisation.
        """
        # The template's prefix does not change the tokens of its suffix.
        before = _ANY_TEXT + template.suffix
        self._require_short(before, "template")
        for index, label in enumerate(labels):
            self._require_short(label, f"labels[{index}]")
        _require_few_label_characters(len(before), labels)
        space = "" if before[-1].isspace() else " "
        encoded = self._encoded([before, *(before + space + label for label in labels)], special=False)
        known, tokens = next(encoded), 0
        continuations: list[tuple[int, ...]] = []
        for index, ids in enumerate(encoded):
            if ids[: len(known)] != known or len(ids) == len(known):
                raise InvalidInput(
                    f"labels[{index}] adds no token of its own after the template; if the template ends in a "
                    "space, remove the space",
                    field=f"labels[{index}]",
                )
            continuations.append(tuple(ids[len(known) :]))
            tokens += len(continuations[-1])
            if tokens > _MOST_LABEL_TOKENS:
                raise InputTooLong(
                    f"labels have more than {_MOST_LABEL_TOKENS} tokens in total; send fewer or shorter "
                    "labels",
                    field="labels",
                )
        return continuations

    @property
    def vocabulary(self) -> int:
        """The number of token ids: the highest id that a text can have, plus one."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the checkpoint's template at the front of a sequence."""
        return self.default_prompt.sequence_plans[0].prompt_tokens

    def _encoded(self, texts: Iterable[str], *, special: bool = True) -> Iterator[list[int]]:
        """Yield the token ids of each text. The tokenizer gets a few texts at a time.

        special: whether to add the special tokens that open and close a sequence.
        """
        for part in _parts(texts):
            for encoding in self._tokenizer.encode_batch_fast(part, add_special_tokens=special):
                yield encoding.ids

    def _require_short(self, text: str, field: str) -> None:
        """Raise InvalidInput if `text` is so long that no room can be left for an input."""
        if len(text) > _CHARACTERS_PER_TOKEN * self.max_tokens:
            raise _no_room(self.max_tokens, field)

    def _cut(self, text: str, template: Template, surplus: int) -> list[int]:
        """Return the tokens of a text in its template, without the last `surplus` tokens of the text.

        Raises InvalidInput if the text has fewer than `surplus` tokens.
        """
        encoding = self._tokenizer.encode(template.around(text))
        first, end = len(template.prefix), len(template.prefix) + len(text)
        # A token that spans prefix and text counts as text; a token that spans text and suffix does not.
        own = [
            index
            for index, ((_, stop), special) in enumerate(
                zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
            )
            if first < stop <= end and not special
        ]
        if surplus > len(own):
            raise _no_room(self.max_tokens, "template")
        cut = set(own[len(own) - surplus :])
        return [token for index, token in enumerate(encoding.ids) if index not in cut]

    def _front_tokens(self, prefix: str) -> int:
        """Return the number of tokens of a prefix at the front of a sequence, including special tokens."""
        if not prefix:
            return 0
        encoded = self._tokenizer.encode(prefix)
        # A special token at the end closes the sequence and does not belong to the prefix.
        return len(encoded.ids) - encoded.special_tokens_mask[-1]


def continued(
    sequences: Iterable[list[int]], plans: Sequence[SequencePlan], most_tokens: int | None = None
) -> list[list[int]]:
    """Return each sequence of token ids once per plan, followed by the plan's continuation.

    Raises InputTooLong, before the following sequences are read, if the result has more than `most_tokens`
    tokens.
    """
    continuation_tokens = sum(len(plan.continuation) for plan in plans)
    read: list[list[int]] = []
    tokens = 0  # of the result; every plan repeats a sequence
    for ids in sequences:
        tokens += len(plans) * len(ids) + continuation_tokens
        if most_tokens is not None and tokens > most_tokens:
            raise _too_many(tokens, most_tokens, "labels" if continuation_tokens else "inputs")
        read.append(ids)
    return [[*ids, *plan.continuation] for ids in read for plan in plans]


def _parts(texts: Iterable[str]) -> Iterator[list[str]]:
    """Split texts into lists of at most _CHARACTERS_AT_ONCE characters; a longer text stands alone."""
    part: list[str] = []
    characters = 0
    for text in texts:
        if part and characters + len(text) > _CHARACTERS_AT_ONCE:
            yield part
            part, characters = [], 0
        part.append(text)
        characters += len(text)
    if part:
        yield part


def _require_few_characters(template: Template, texts: int, most_tokens: int) -> None:
    """Raise InputTooLong if a template around this many texts must exceed `most_tokens` tokens."""
    most, own = _CHARACTERS_PER_TOKEN * most_tokens, len(template.prefix) + len(template.suffix)
    if own * texts > most:
        raise InputTooLong(
            f"the template has {own} characters, and with {texts} inputs at most {most // texts} are "
            "accepted; send fewer inputs or a shorter template",
            field="template" if own > most else "inputs",
        )


def _require_few_label_characters(before: int, labels: Sequence[str]) -> None:
    """Raise InputTooLong if labels have too many characters; `before` characters are added to each label."""
    repeated, own = before * len(labels), sum(map(len, labels))
    if repeated + own > _MOST_LABEL_CHARACTERS:
        raise InputTooLong(
            f"labels, each counted with the template's text before it, have {repeated + own} characters in "
            f"total, and at most {_MOST_LABEL_CHARACTERS} are accepted; shorten the template after {{}}, or "
            "send fewer or shorter labels",
            field="template" if repeated > own else "labels",
        )


def _no_room(max_tokens: int, field: str) -> InvalidInput:
    return InvalidInput(
        f"{field}: there is no room left for a text within {max_tokens} tokens; shorten this value",
        field=field,
    )


def _too_many(tokens: int, most: int, field: str) -> InputTooLong:
    shorten = (
        "send fewer or shorter labels or inputs" if field == "labels" else "send fewer or shorter inputs"
    )
    return InputTooLong(
        f"{field} make sequences with {tokens} tokens or more, and a request may have {most}: {shorten}",
        field=field,
    )
