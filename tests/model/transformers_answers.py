"""What Hugging Face transformers answers with a model folder: run by an interpreter that has torch and transformers.

    python tests/model/transformers_answers.py FOLDER REQUESTS.json DTYPE ATTENTION

REQUESTS.json is a list of [prompt, expected answer]. Requests of one length are decoded together, greedily, with
transformers' own KV cache. Printed is one line of JSON: judged, wrong, and margin, the fewest nats by which an
expected token led the next one.

Invariants:
- Nothing of kvcheck is imported: the environment is one of transformers.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import torch
import transformers


def main(folder: str, requests: str, dtype: str, attention: str) -> None:
    """Decode every request and print the line."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    )
    if any(getattr(model.config, name, 0) for name in ("num_experts", "num_local_experts")):
        model.set_experts_implementation("eager")  # the others take no float64
    alike = defaultdict(list)
    for prompt, expected in json.loads(Path(requests).read_text(encoding="utf-8")):
        alike[len(prompt), len(expected)].append((prompt, expected))
    judged, wrong, margin = 0, 0, float("inf")
    for (_, count), batch in alike.items():
        prompts, expected = (torch.tensor(each) for each in zip(*batch, strict=True))
        answer = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        said = answer.sequences[:, prompts.shape[1] :]
        judged, wrong = judged + expected.numel(), wrong + int((said != expected).sum())
        logits = torch.stack(answer.logits, 1).double()
        right = expected[:, :, None]
        lead = logits.gather(2, right)[:, :, 0] - logits.scatter(2, right, -torch.inf).amax(2)
        margin = min(margin, float(lead.min()))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    sys.stdout.write(json.dumps({"judged": judged, "wrong": wrong, "margin": round(margin, 3)} | versions) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
