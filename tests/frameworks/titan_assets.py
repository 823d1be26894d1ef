"""Makes the texts and the tokenizer of torchtitan's test jobs, as it has them in its own repository."""

from __future__ import annotations

import json
import random
from pathlib import Path

__all__ = ["make_assets"]

_WORDS = 200


def make_assets(folder: Path, documents: int = 60) -> Path:
    """Write ``texts/`` (JSON lines) and ``tokenizer/`` into ``folder``, and return it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    texts, tokenizer = folder / "texts", folder / "tokenizer"
    texts.mkdir(parents=True)
    tokenizer.mkdir()
    drawn = random.Random(3)
    lines = [" ".join(f"w{drawn.randrange(_WORDS)}" for _ in range(drawn.randint(5, 60))) for _ in range(documents)]
    (texts / "texts.json").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    words = {f"w{number}": number for number in range(_WORDS)} | {"<s>": _WORDS, "</s>": _WORDS + 1, "<?>": _WORDS + 2}
    made = Tokenizer(models.WordLevel(words, unk_token="<?>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(tokenizer / "tokenizer.json"))
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder
