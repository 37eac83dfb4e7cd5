"""Turn texts into token sequences, exactly as the library that made the checkpoint does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property, partial
from itertools import chain, groupby, pairwise, takewhile
from typing import Literal, TypeVar

from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.checkpoints.template import Template, Text
from attncache_core.corpus.reading import neighbours
from attncache_core.errors import InvalidInput, UnsupportedModel
from attncache_core.text.fast_tokenizer import read_fast_tokenizer
from attncache_core.text.limits import (
    count_tokens,
    encoded,
    list_of,
    no_room,
    no_room_beside_query,
    require_few_characters,
    require_few_characters_of_text,
    require_few_label_characters,
    require_few_label_tokens,
    require_fitting,
    require_short,
    shortened,
    too_long,
    too_many,
)
from attncache_core.text.pairs import Cut, NoRoom, PairLayout, PairTokens, TruncatedTokens
from attncache_core.text.prompts import Frame, Piece, Prompt, SequencePlan, pieces_of

# In tokens, of a model and a tokenizer without a limit.
_NO_LIMIT = 10**9
_Pair = tuple[str, str]
# Texts whose first tokens differ, also where a tokenizer joins a token with the text before it.
_DIFFERENT_TEXTS = ("text", "7", "(", " a", "\n")
# A text of fewer characters is tokenised faster than another thread gives the interpreter lock back.
_SHORT_CHARACTERS = 512
# A tokenizer takes up to 430 bytes per character while it works, so it gets at most this many at a time.
_CHARACTERS_AT_ONCE = 2**18


class TextTokenizer:
    """A fast tokenizer that applies the checkpoint's template, lowercasing and length limit. Thread safe."""

    def __init__(self, checkpoint: Checkpoint, max_tokens: int | None = None) -> None:
        """Load the tokenizer of a checkpoint.

        max_tokens: the longest sequence in tokens, if that is less than the model's own limit.
        Raises UnsupportedModel if the model folder has no tokenizer that can be used, and InvalidInput if the
        checkpoint's template leaves no room for a text.
        """
        read = read_fast_tokenizer(checkpoint)
        self._tokenizer, self._special, self._has_types = read.tokenizer, read.special, read.has_types
        limits = checkpoint.max_tokens or read.max_tokens, checkpoint.position_limit, max_tokens
        self.max_tokens = int(min([_NO_LIMIT, *filter(None, limits)]))
        # The number of token ids: the highest id that a text can have, plus one.
        self.vocabulary = read.vocabulary
        # The number of them that the model accepts: the tokenizer of EmbeddingGemma has one more.
        rows = checkpoint.config.get("vocab_size")
        self.known_ids = min(self.vocabulary, rows) if isinstance(rows, int) else self.vocabulary
        # A sample, for questions about a template whose answer does not depend on the text.
        self._any_text = self._text_with_a_token()
        sample = self._tokenizer.encode(self._any_text)
        special = sum(sample.special_tokens_mask)
        if special >= self.max_tokens:
            raise UnsupportedModel(
                f"a text of model {checkpoint.name} may have {self.max_tokens} tokens, and has {special} "
                "special ones; allow longer texts by max_tokens, max_seq_length in sentence_bert_config.json "
                "and model_max_length in tokenizer_config.json",
                field="model",
            )
        if self._has_types and any(sample.type_ids):
            raise UnsupportedModel(
                f"the tokenizer of model {checkpoint.name} gives tokens of a single text other types than 0, "
                "which is not served",
                field="model",
            )
        self.default_prompt = self.prompt(checkpoint.template)
        self._prefixes = checkpoint.prompts

    def prompt(self, template: Template, *, field: str = "template", continuation_tokens: int = 0) -> Prompt:
        """Prepare a template for this tokenizer.

        field: the name of the template in error messages.
        continuation_tokens: the most tokens that will follow a text in the template.
        Raises InvalidInput if no room is left for a text. The error names `field` if the template is too
        long, and "labels" if the continuation is too long.
        """
        require_short(template.characters, self.max_tokens, field)
        if template != Template() or continuation_tokens:
            around = template.around(template.sample(""))
            taken = len(encoded(self._tokenizer, around, field, special=True))
            if taken >= self.max_tokens:
                raise no_room(self.max_tokens, field)
            if taken + continuation_tokens >= self.max_tokens:
                raise no_room(self.max_tokens, "labels")
        return Prompt(template, (SequencePlan(self._front_tokens(template.prefix)),))

    def named_prompt(self, name: str | None) -> Prompt:
        """Return the checkpoint's prompt with this name; None: its default prompt.

        Raises InvalidInput if there is none of this name.
        """
        if name is None:
            return self.default_prompt
        if name not in self._prefixes:
            known = f"its prompts are {', '.join(self._prefixes)}" if self._prefixes else "it has no prompts"
            raise InvalidInput(f"prompt_name names no prompt of the model; {known}", field="prompt_name")
        return self.prompt(Template(prefix=self._prefixes[name]), field="prompt_name")

    def front(self, template: Template) -> list[int]:
        """Return the token ids that texts in a template begin with.

        A token may span the end of the template's prefix and a text, so these may be fewer tokens than the
        prefix alone has. Raises InvalidInput if the template has no prefix, or leaves no room for a text.
        """
        self.prompt(template)
        place = "{query}" if template.is_for_pairs else "{}"
        if not template.prefix:
            raise InvalidInput(f"template has no text in front of {place}", field="template")
        samples = map(template.sample, _DIFFERENT_TEXTS)
        sequences = [
            encoded(self._tokenizer, template.around(text), "template", special=True).ids for text in samples
        ]
        columns = zip(*sequences, strict=False)
        front = [column[0] for column in takewhile(lambda tokens: len(set(tokens)) == 1, columns)]
        if not front:
            raise InvalidInput(
                f"the text in front of {place} in template is no token of its own", field="template"
            )
        return front

    def tokenize(
        self,
        texts: Iterable[Text],
        *,
        truncate: bool,
        prompt: Prompt | None = None,
        max_total_tokens: int | None = None,
    ) -> Sequence[Sequence[int]]:
        """Return the token ids of each text in its template: for each text, one sequence per sequence plan.

        A text may be a pair: a query and a document for a template of pairs, else two texts between the
        checkpoint's separators, which become PairTokens.

        A sequence has at most `max_tokens` tokens: a text that is too long loses tokens at its end. The
        template, the plan's continuation and the special tokens of the sequence are never cut. In a template
        of pairs only the document is cut, and between separators the texts are cut as the prompt's `cut`
        says.
        prompt: by default the checkpoint's template.
        max_total_tokens: a limit for all sequences together.
        Raises InputTooLong, which names the text, if a text is too long and `truncate` is False. Raises
        InputTooLong also if all sequences have more than `max_total_tokens` tokens together. The error is
        raised before tokenisation if the template alone has too many characters for this many texts. Raises
        InvalidInput if the template takes no pair, or a pair is needed, or a part that is not cut leaves no
        room. A text of more characters than limits.max_characters is refused too, as InputTooLong, if it
        has fewer tokens than a sequence may have.
        """
        texts = list_of(texts)
        prompt = prompt or self.default_prompt
        template, plans = prompt.template, prompt.sequence_plans
        if max_total_tokens is not None:
            require_few_characters(template, len(texts), max_total_tokens)
        require_fitting(template, texts)
        room = self.max_tokens - max(len(plan.continuation) for plan in plans)
        return continued(self._cut_to(room, texts, prompt, truncate), plans, max_total_tokens)

    def _cut_to(
        self, room: int, texts: Sequence[Text], prompt: Prompt, truncate: bool
    ) -> Iterator[Sequence[int]]:
        """Yield the tokens of each text of a prompt, cut to `room` tokens. Raises as `tokenize` does."""
        template, first = prompt.template, 0
        for kind, stretch in groupby(texts, type):
            whole = list(stretch)
            uncut = [self._shortened(text, index) for index, text in enumerate(whole, first)]
            if issubclass(kind, tuple) and not template.is_for_pairs:
                pairs = [
                    (text, before)
                    for text, before in zip(uncut, whole, strict=True)
                    if isinstance(text, tuple) and isinstance(before, tuple)
                ]
                yield from self._between_separators(pairs, prompt.cut, room, truncate, first)
            else:
                field_of = partial(_field_of_input, first)
                for index, ids in enumerate(self._encoded(map(template.around, uncut), field_of)):
                    surplus = len(ids) - room
                    if surplus > 0 and not truncate:
                        raise too_long(room, first + index)
                    if surplus > 0:
                        pair = field_of(index) if template.is_for_pairs else None
                        parts = template.parts(uncut[index])
                        ids = TruncatedTokens(self._cut(parts, room, "right", pair)[0])
                    yield ids
            first += len(uncut)

    def _between_separators(
        self, pairs: Sequence[tuple[_Pair, _Pair]], cut: Cut, room: int, truncate: bool, first: int
    ) -> Iterator[PairTokens]:
        """Yield the tokens of each pair between the checkpoint's separators, cut to `room` tokens.

        A text that is in several pairs is tokenised once. pairs: shortened, and before that. first: index of
        the first pair in the request.
        """
        distinct = dict.fromkeys(text for pair, _ in pairs for text in pair)

        def field_of(index: int) -> str:
            text = list(distinct)[index]
            return _field_of_input(first, next(at for at, (pair, _) in enumerate(pairs) if text in pair))

        tokenized = zip(distinct, self._encoded(distinct, field_of, special=False), strict=True)
        known: dict[str, list[int]] = {}
        count = cache(partial(count_tokens, self._tokenizer, tokens=self.max_tokens))

        def counts(whole: _Pair) -> tuple[int, int]:
            return count(whole[0]), count(whole[1])

        for index, ((one, other), whole) in enumerate(pairs, first):
            while one not in known or other not in known:
                known.update([next(tokenized)])
            of_whole = partial(counts, whole) if (one, other) != whole else None
            try:
                tokens = self._pair_layout.around(known[one], known[other], room, cut, of_whole)
            except NoRoom as error:
                raise no_room(self.max_tokens, f"inputs[{index}]") from error
            if tokens.is_cut and not truncate:
                raise too_long(room, index)
            yield tokens

    def _shortened(self, text: Text, index: int) -> Text:
        """Return a text without characters that cannot change its first `max_tokens` tokens."""
        if isinstance(text, tuple):
            one, other = (shortened(self._tokenizer, part, self.max_tokens, index) for part in text)
            return one, other
        return shortened(self._tokenizer, text, self.max_tokens, index)

    def turns(self, texts: Sequence[str], field: str = "inputs") -> list[list[int]]:
        """Return the token ids of each text by itself, without a template and without special tokens.

        The tokens of a text do not depend on the texts around it, so they stay the same in a conversation
        that grows. A text may have no token. Raises InputTooLong, which names `field`, if a text has too many
        characters; see limits.max_characters.
        """
        for text in texts:
            require_few_characters_of_text(text, self.max_tokens, field)
        return list(self._encoded(texts, lambda _: field, special=False))

    def frame(self, prompt: Prompt) -> Frame:
        """Return the tokens that a prompt puts around the tokens of `turns`.

        Raises InvalidInput if the prompt leaves no room.
        """
        template, sample = prompt.template, self._tokenizer.encode(self._any_text)
        if template.is_for_pairs:
            raise InvalidInput("a template of pairs takes no conversation", field="template")
        of_text = [index for index, special in enumerate(sample.special_tokens_mask) if not special]
        prefix, suffix = self.turns([template.prefix, template.suffix])
        before, after = [*sample.ids[: of_text[0]], *prefix], [*suffix, *sample.ids[of_text[-1] + 1 :]]
        continuation_tokens = max(len(plan.continuation) for plan in prompt.sequence_plans)
        room = self.max_tokens - len(before) - len(after) - continuation_tokens
        if room < 1:
            raise no_room(self.max_tokens, "template")
        return Frame(before, after, room, of_text[0])

    def require_open_end(self) -> None:
        """Raise UnsupportedModel if the tokenizer ends every text with a special token, before any label."""
        if self._tokenizer.encode(self._any_text).special_tokens_mask[-1]:
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
        before = self._any_text + template.suffix
        require_short(len(before), self.max_tokens, "template")
        for index, label in enumerate(labels):
            require_short(len(label), self.max_tokens, f"labels[{index}]")
        require_few_label_characters(len(before), labels)
        space = "" if before[-1].isspace() else " "
        tokenized = self._encoded(
            [before, *(before + space + label for label in labels)],
            lambda index: f"labels[{index - 1}]" if index else "template",
            special=False,
        )
        known, tokens = next(tokenized), 0
        continuations: list[tuple[int, ...]] = []
        for index, ids in enumerate(tokenized):
            if ids[: len(known)] != known or len(ids) == len(known):
                raise InvalidInput(
                    f"labels[{index}] adds no token of its own after the template; if the template ends in a "
                    "space, remove the space",
                    field=f"labels[{index}]",
                )
            continuations.append(tuple(ids[len(known) :]))
            tokens += len(continuations[-1])
            require_few_label_tokens(tokens)
        return continuations

    def pieces(self, texts: Sequence[str], *, special: bool = True) -> list[list[Piece]]:
        """Return the tokens of each text with the characters that they stand for, without a template.

        special: whether to add the special tokens that open and close a sequence. Raises InputTooLong as
        `turns` does, which names the text.
        """
        for index, text in enumerate(texts):
            require_few_characters_of_text(text, self.max_tokens, f"inputs[{index}]")
        return [
            pieces_of(text, encoded(self._tokenizer, text, f"inputs[{index}]", special=special))
            for index, text in enumerate(texts)
        ]

    def decode(self, sequences: Sequence[Sequence[int]], *, skip_special: bool = True) -> list[str]:
        """Return the text of each sequence of token ids. skip_special: leave special tokens out."""
        return self._tokenizer.decode_batch(list(map(list, sequences)), skip_special_tokens=skip_special)

    def written(self, ids: Iterable[int]) -> list[str]:
        """Return each token as text, such as "##ing" or " card"; "" for an unknown id."""
        return self.decode([[token] for token in ids], skip_special=False)

    def written_behind(self, ids: Sequence[int]) -> list[str]:
        """Return what each token adds to the text behind the token in front of it.

        A decoder may write the first token of a text without the space that begins it. A token behind a part
        of a character is written as if it stood alone, because decoders may join both into a wrong character.
        """
        alone = self.written(ids)
        both = self.decode(list(pairwise(ids)), skip_special=False)
        return alone[:1] + [
            token if first.endswith("\ufffd") else pair[len(first) :]
            for (first, token), pair in zip(pairwise(alone), both, strict=True)
        ]

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the checkpoint's template at the front of a sequence."""
        return self.default_prompt.sequence_plans[0].prompt_tokens

    def _encoded(
        self, texts: Iterable[str], field_of: Callable[[int], str], *, special: bool = True
    ) -> Iterator[list[int]]:
        """Yield the token ids of each text. The tokenizer gets a few texts at a time.

        field_of: returns the field of text `index`, for errors. special: whether to add the special tokens
        that open and close a sequence. Raises InvalidInput if the tokenizer cannot read a text.
        """
        first = 0
        for part in neighbours(texts, len, _CHARACTERS_AT_ONCE):
            if len(part) == 1 and len(part[0]) <= _SHORT_CHARACTERS:  # keeps the lock
                encodings = [encoded(self._tokenizer, part[0], field_of(first), special=special)]
            else:
                try:
                    encodings = self._tokenizer.encode_batch_fast(part, add_special_tokens=special)
                except Exception:
                    # One by one, so that the error names the text.
                    encodings = [
                        encoded(self._tokenizer, text, field_of(index), special=special)
                        for index, text in enumerate(part, first)
                    ]
            first += len(part)
            for encoding in encodings:
                yield encoding.ids

    def _text_with_a_token(self) -> str:
        """Return a text that has a token. Raises UnsupportedModel if there is none."""
        words = (self._tokenizer.decode([token]) for token in range(self.vocabulary))
        for text in chain(["text"], words):
            with suppress(InvalidInput):  # a text that the tokenizer has no token for
                if encoded(self._tokenizer, text, "text").ids:
                    return text
        raise UnsupportedModel("the tokenizer has no token for any text", field="model")

    @cached_property
    def _pair_layout(self) -> PairLayout:
        """The special tokens around a pair, and the types of its tokens."""
        sample = self._tokenizer.encode(self._any_text, self._any_text)
        types = sample.type_ids if self._has_types else [0] * len(sample.ids)
        return PairLayout.of(sample.ids, types, sample.sequence_ids)

    def cut_at_beginning(self, text: str, prompt: Prompt, field: str) -> tuple[list[int], int]:
        """Return the tokens of a text in a prompt, cut at the beginning of the text, and where the cut is.

        The prompt is not one of pairs, and its continuations are left out. The cut is the first character of
        the text whose token is kept; 0 if nothing is cut. Raises InputTooLong, which names `field`, as
        `turns` does, and InvalidInput if the prompt leaves no room.
        """
        require_few_characters_of_text(text, self.max_tokens, field)
        room = self.max_tokens - max(len(plan.continuation) for plan in prompt.sequence_plans)
        return self._cut(prompt.template.parts(text), room, "left")

    def _cut(
        self,
        parts: tuple[str, str, str],
        room: int,
        side: Literal["right", "left"],
        pair: str | None = None,
    ) -> tuple[list[int], int]:
        """Return `room` tokens of three joined texts, by cutting the middle one, and where its rest begins.

        pair: the field of the pair whose query stands in the first text; None: no query does. Raises
        InvalidInput if the middle one has fewer tokens than are too many.
        """
        front, text, _ = parts
        encoding = self._tokenizer.encode("".join(parts))
        surplus = max(0, len(encoding.ids) - room)
        first, end = len(front), len(front) + len(text)
        # A token that spans front and text counts as text; a token that spans text and end does not.
        of_text = [
            index
            for index, ((_, stop), special) in enumerate(
                zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
            )
            # The first token of a text may stand for no character: the space that a tokenizer puts before it.
            if (first < stop or not front) and stop <= end and not special
        ]
        if surplus > len(of_text):
            raise (
                no_room_beside_query(self.max_tokens, pair) if pair else no_room(self.max_tokens, "template")
            )
        cut = set(of_text[:surplus] if side == "left" else of_text[len(of_text) - surplus :])
        kept = [token for index, token in enumerate(encoding.ids) if index not in cut]
        if side == "right" or not surplus:
            return kept, 0
        return kept, len(text) if surplus == len(of_text) else encoding.offsets[of_text[surplus]][0] - first

    def _front_tokens(self, prefix: str) -> int:
        """Return the number of tokens of a prefix at the front of a sequence, including special tokens."""
        if not prefix:
            return 0
        ids = self._tokenizer.encode(prefix).ids
        # A special token at the end closes the sequence and does not belong to the prefix. As in
        # sentence-transformers, one that the prefix itself ends in is taken for it.
        return len(ids) - bool(ids and ids[-1] in self._special)


def _field_of_input(first: int, index: int) -> str:
    return f"inputs[{first + index}]"


Ids = TypeVar("Ids", bound=Sequence[int])


def continued(
    sequences: Iterable[Ids], plans: Sequence[SequencePlan], max_total_tokens: int | None = None
) -> list[Ids | list[int]]:
    """Return each sequence of token ids once per plan, followed by the plan's continuation.

    Raises InputTooLong, before the following sequences are read, if the result has more than
    `max_total_tokens` tokens.
    """
    continuation_tokens = sum(len(plan.continuation) for plan in plans)
    read: list[Ids] = []
    tokens = 0  # of the result; every plan repeats a sequence
    for ids in sequences:
        tokens += len(plans) * len(ids) + continuation_tokens
        if max_total_tokens is not None and tokens > max_total_tokens:
            raise too_many(tokens, max_total_tokens, "labels" if continuation_tokens else "inputs")
        read.append(ids)
    return [_followed(ids, plan.continuation) if plan.continuation else ids for ids in read for plan in plans]


def _followed(ids: Sequence[int], continuation: Sequence[int]) -> list[int]:
    made = TruncatedTokens if isinstance(ids, TruncatedTokens) else list
    return made((*ids, *continuation))
