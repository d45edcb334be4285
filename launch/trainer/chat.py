"""Conversations: read from records, rendered by the tokenizer's chat template, and trained on their answers alone."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from typing import Any

import jinja2
import transformers

from .schema import ConfigError


def check_text(text: str, key: str, where: str) -> None:
    """Raises ConfigError: JSON can spell half of a character, which no text holds."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(key, f"{where} holds half of a surrogate pair, \\u{ord(text[error.start]):04x}") from error


def conversation(messages: Any, where: str) -> str:
    """The document that stands for a record's messages: their JSON. Raises ConfigError."""
    key = "data.messages_field"
    if not isinstance(messages, list) or not messages:
        raise ConfigError(key, f"{where} holds no list of messages, but {str(messages)[:80]}")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            shown = str(message)[:80]
            raise ConfigError(key, f"{where}: expects messages with role and content, both text, got {shown}")
        check_text(message["content"], key, where)
    if not any(message["role"] == "assistant" for message in messages[1:]):
        raise ConfigError(key, f"{where} has no answer: no message after the first has the role assistant")
    return json.dumps(messages)


def documented_functions(source: str) -> Iterator[str]:
    """Conversations from Python source: a function without its docstring, answered by the docstring's first line."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # the standard library keeps some files of other syntax on purpose
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node) or len(node.body) < 2:
            continue
        docstring = node.body[0]
        assert docstring.end_lineno is not None
        code = lines[node.lineno - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]
        summary = str(ast.get_docstring(node)).splitlines()[0]
        question = "What does this function do?\n\n" + "\n".join(code)
        yield json.dumps([{"role": "user", "content": question}, {"role": "assistant", "content": summary}])


def text_of(document: str) -> str:
    """What the messages of a document say."""
    return "\n".join(message["content"] for message in json.loads(document))


def encode(tokenizer: transformers.PreTrainedTokenizerBase, document: str) -> list[int]:
    """The ids of a conversation. `~id` (a negative number) for those outside of its answers: tokens that are read but
    not learned. An answer reaches from where the template asks for it to the end of its turn.

    Raises:
        ConfigError: a template that cannot be used.
    """
    messages = json.loads(document)
    text = _render(tokenizer, messages)
    answers = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index == 0:
            continue
        prompt = _render(tokenizer, messages[:index], add_generation_prompt=True)
        whole = _render(tokenizer, messages[: index + 1])
        if not text.startswith(whole) or not whole.startswith(prompt):
            raise ConfigError(
                "tokenizer.chat_template",
                "renders the same turn in two ways, with and without those that follow, so that answers cannot be "
                "told from prompts; use conversations of one answer, or a template that does not look ahead",
            )
        answers.append((len(prompt), len(whole)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    learned = [any(first <= start < end <= last for first, last in answers) for start, end in encoded["offset_mapping"]]
    return [token if learn else ~token for token, learn in zip(encoded["input_ids"], learned, strict=True)]


def check_tokenizer(tokenizer: transformers.PreTrainedTokenizerBase, path: str | None) -> None:
    """Raises ConfigError: there is no chat template, or the tokenizer cannot say where its tokens are in the text."""
    if not tokenizer.chat_template:
        raise ConfigError("tokenizer.chat_template", "the tokenizer has none: name a file (configs/chatml.jinja)")
    if not tokenizer.is_fast:
        raise ConfigError("tokenizer.path", f"{path} is no fast tokenizer, which data.messages_field needs")


def _render(tokenizer: transformers.PreTrainedTokenizerBase, messages: list[Any], **options: Any) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except (jinja2.TemplateError, TypeError) as error:
        raise ConfigError("tokenizer.chat_template", f"fails for a conversation: {error}") from error
