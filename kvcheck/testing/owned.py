"""watch: checks that a value that was handed out keeps its bytes and shares none with memory that will be reused."""

from __future__ import annotations

from types import TracebackType

import torch

from kvcheck.core.base.record import Finding
from kvcheck.testing.failures import Judged, NotJudged, settled
from kvcheck.testing.judge import dump
from kvcheck.testing.plan import conclude
from kvcheck.testing.reached import HeldTensor, bytes_of, is_readable, overlap, reached

__tracebackhide__ = True


class watch:
    """Judge a value that its receiver owns: a tensor, or an object that holds tensors.

        with watch(buffers.get(slot), of=buffers, name="metadata of slot 3", owner="request 1"):
            buffers.put(slot, the_next_request)

    At once, a tensor that shares bytes with a tensor below `of` is KV305. At the end of the block, or when `check` is
    called, a tensor whose bytes have changed is KV303. Both raise IntegrityError; a value without tensors raises
    NotJudged.

    of: the object that owns the memory. owner, name: receiver and description of the value, for messages. is_view: the
    value may share memory and only has to stay unchanged until the end of the block.

    A pass covers overlap with `of` and changes within the block. Not covered: changes after the block, copies still in
    flight, and memory that `of` does not lead to.
    """

    def __init__(
        self,
        value: object,
        *,
        of: object = None,
        name: str = "value",
        owner: str = "its receiver",
        is_view: bool = False,
    ) -> None:
        self._name, self._owner = name, owner
        given = [each for each in reached(value, root=name) if each.tensor.numel()]
        odd = [each.path for each in given if not is_readable(each.tensor)]
        if not given or odd:
            why = f"{', '.join(odd)} cannot be read byte by byte" if odd else "it holds no tensor"
            raise NotJudged(f"{name} cannot be watched: {why}; pass the tensors that have to be owned")
        if any(each.tensor.is_cuda for each in given):
            torch.cuda.synchronize()
        self._given = [(each, bytes_of(each.tensor)) for each in given]
        self._words = {each.path: -(-len(before) // 8) for each, before in self._given}
        self.judged = self._result([] if is_view or of is None else self._shared(of))
        if self.judged.findings:
            conclude(self.judged)

    def __enter__(self) -> watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.check()

    def check(self) -> Judged:
        """Raise IntegrityError if the value has changed since it was handed out."""
        if any(each.tensor.is_cuda for each, _ in self._given):
            torch.cuda.synchronize()
        changed = [found for each, before in self._given if (found := self._changed(each, before)) is not None]
        self.judged = self._result(changed)
        return conclude(self.judged)

    def _result(self, findings: list[Finding]) -> Judged:
        return settled(findings, self._words, len(self._words), not_tried=())

    def _shared(self, of: object) -> list[Finding]:
        kept = [each for each in reached(of, root=type(of).__name__) if is_readable(each.tensor)]
        return [
            Finding(
                code="KV305",
                oracle="aliasing",
                message=f"{each.path}, which {self._owner} was given to keep, shares its memory with "
                f"{_place(each, held)}; whoever gets that memory next changes it",
                buffer=each.path,
            )
            for each, _ in self._given
            for held in kept
            if overlap(each.tensor, held.tensor)
        ]

    def _changed(self, each: HeldTensor, before: torch.Tensor) -> Finding | None:
        now = bytes_of(each.tensor)
        if torch.equal(now, before):
            return None
        wrong = torch.nonzero(now != before).view(-1)
        first = int(wrong[0])
        return Finding(
            code="KV303",
            oracle="aliasing",
            message=f"{each.path}, which {self._owner} was given, changed after it had been handed over: {len(wrong)} "
            f"of {len(now)} bytes",
            buffer=each.path,
            minimal={"seen": dump(now, first), "wanted": dump(before, first)},
        )


def _place(given: HeldTensor, held: HeldTensor) -> str:
    tensor = held.tensor
    if tensor.dim() > 1:
        for row in range(tensor.shape[0]):
            if overlap(given.tensor, tensor[row]):
                return f"{held.path}, row {row}"
    return held.path
