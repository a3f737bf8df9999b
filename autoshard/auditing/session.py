"""``autoshard.audit``: one-device model and ranks in one process, and what differs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from autoshard.auditing.buffers import CopiedBuffers, values_of
from autoshard.auditing.checkpoint import Built, SavedStates, cleared, findings_of
from autoshard.auditing.diagnose import diagnose
from autoshard.auditing.endings import stops, unread
from autoshard.auditing.field.prove import ExactSteps, residues_in
from autoshard.auditing.findings import AuditFinding, AuditReport, Proof
from autoshard.auditing.rank_threads import RankEnd, RankThreads
from autoshard.auditing.recording import Recorder
from autoshard.auditing.rendezvous import Reduction, Rendezvous, reduced
from autoshard.auditing.state import Elements, make_distinct, restorer, same_values
from autoshard.auditing.step import StepState, run_step
from autoshard.cluster import Mesh
from autoshard.errors import UsageError, VerificationError
from autoshard.interop.targets import find_callable
from autoshard.torch_adapters.threaded_groups import (
    check_torch,
    join_world,
    leave_world,
    new_store,
    threads_are_ranks,
)

Step = Callable[..., Any]


class audit:
    """Compare the steps of parallel ranks with the step of one device, in this process.

        with autoshard.audit(reference=model, mesh="dp=2,tp=2", batch=batch) as a:
            a.rank(lambda model: train_step(parallel(model), my_part_of(batch)))
        a.check()

    Inside, ``torch.distributed`` is initialised on every rank (a thread each, one at a time), floating
    numbers are float64, and every element of the reference has a value of its own, so that what a rank holds
    of it is read from its values. Ranks must take their parameters from the reference: from the copy that
    their function gets, or from ``reference`` itself.

    Args:
        reference: the model of one device.
        mesh: axes and sizes, for instance ``dp=2,tp=2``; rank numbers are row-major over them.
        batch: what the default step calls the reference with (a dict of keywords, a tuple, or one value).
        step: what one device does, ``step(model)``; by default a call, and backward of its loss.
        tolerance: largest relative error of a gradient; by default 1e-6, more for computing in fewer bits.
        seed: of random numbers of the reference and of each rank.
        prove: where no difference is found, run both steps in exact arithmetic as well.

    Raises:
        UsageError: the mesh or the step cannot be, or torch is older than 2.13.
    """

    def __init__(
        self,
        reference: nn.Module,
        mesh: str | Mesh,
        *,
        batch: Any = None,
        step: Step | None = None,
        tolerance: float | None = None,
        seed: int = 0,
        prove: bool = True,
    ) -> None:
        check_torch()
        self.mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
        if step is None and batch is None:
            raise UsageError(
                "an audit needs the step of one device",
                hint="give batch=..., or step=lambda model: loss(model, batch).backward()",
            )
        self._model, self._batch, self._step = reference, batch, step or self._default_step
        self._tolerance, self._seed, self._prove = tolerance, seed, prove
        self._reports: list[AuditReport] = []
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> audit:
        default, undo, numbers = torch.get_default_dtype(), restorer(self._model), torch.get_rng_state()

        def restore() -> None:
            torch.set_default_dtype(default)
            torch.set_rng_state(numbers)
            undo()

        self._undo.append(restore)
        torch.set_default_dtype(torch.float64)
        self._model.double()
        make_distinct(self._model, self._seed)
        self._batch = tree_map_only(torch.Tensor, _widened, self._batch)
        try:
            self._run_reference()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._undo:
            self._undo.pop()()

    def rank(self, function: Step) -> AuditReport:
        """Run a rank's step on all ranks, and compare.

        Args:
            function: called on every rank, with a copy of the reference if it takes an argument.

        Returns:
            the report of this step; `report` and `check` speak of all.
        """
        report = self._compared(function)
        if report.ok and self._prove:
            report = replace(report, proof=self.proof(function))
        self._reports.append(report)
        return report

    def _compared(self, function: Step) -> AuditReport:
        """Run a rank's step on all ranks, in numbers."""
        size = self.mesh.world_size
        recorders = [Recorder() for _ in range(size)]
        left = [StepState() for _ in range(size)]

        def main(rank: int) -> None:
            step, copied = self._bound(function)
            left[rank] = run_step(step, self.elements, recorders[rank], copied)

        ends, messages = self._run(self.mesh, recorders, main)
        return diagnose(
            self.mesh,
            self.elements,
            self._buffers,
            self._left,
            left,
            [self._recorder, *recorders],
            ends,
            messages,
            self._tolerance,
        )

    def proof(self, function: Step) -> Proof:
        """Whether ranks compute the reference's formulas: both steps, in exact arithmetic.

        Args:
            function: as of `rank`, which calls this where it finds no difference.
        """
        proof = self._proved(function, self._seed, keeps_records=False)
        if not proof.names:
            return proof
        # at another point, as two residues may be equal by chance; a difference has its line from records
        return self._proved(function, self._seed + 1, keeps_records=True)

    def _proved(self, function: Step, seed: int, keeps_records: bool) -> Proof:
        exact = ExactSteps(seed)
        with residues_in(self._model, seed):
            elements = Elements.of(self._model)
            model = copy.deepcopy(self._model)
            reference = Recorder(keeps_values=keeps_records, keeps_records=keeps_records)
            torch.manual_seed(self._seed)
            exact.reference(lambda: self._step(model), elements, reference)
            recorders = [Recorder(keeps_records=keeps_records) for _ in range(self.mesh.world_size)]

            def main(rank: int) -> None:
                exact.rank(rank, self._bound(function)[0], elements, recorders[rank])

            findings: list[AuditFinding] = []
            if not exact.errors:
                ends, messages = self._run(self.mesh, recorders, main, elements, exact.functions.reduced)
                findings = stops(ends, messages) or unread(messages)
        return exact.proof(self.mesh, elements, [reference, *recorders], findings)

    def checkpoint(
        self,
        build: Step,
        save: Callable[..., None],
        load: Callable[..., None],
        mesh: str | Mesh | None = None,
    ) -> AuditReport:
        """Save on all ranks, load on the ranks of another mesh, and compare every element with the reference.

        Args:
            build: makes a rank's model of its copy of the reference; or ``(model, optimizer)``, all followed.
            save: ``save(model, folder)`` or ``save(model, optimizer, folder)`` of a rank; one folder for all.
            load: the same, into a model and an optimizer without values.
            mesh: of the ranks that load; by default those that saved.
        """
        other = Mesh.parse(mesh) if isinstance(mesh, str) else mesh or self.mesh
        wrong: list[list[tuple[str, int, int]]] = [[] for _ in range(other.world_size)]
        reports, saved = [], SavedStates()
        with TemporaryDirectory() as folder:

            def saving(rank: int) -> None:
                built = self._built(build)
                saved.fill(built, self.elements)
                save(*built.arguments(), folder)

            def loading(rank: int) -> None:
                built = self._built(build)
                parts = cleared(built, self.elements, saved)
                load(*built.arguments(), folder)
                wrong[rank] = [each for part in parts if (each := part.wrong())]

            for ranks, main in ((self.mesh, saving), (other, loading)):
                recorders = [Recorder() for _ in range(ranks.world_size)]
                reports.append(stops(*self._run(ranks, recorders, main)))
                if reports[-1]:
                    break
        result = [finding for each in reports for finding in each] or findings_of(wrong, str(other))
        text = f"{self.mesh} saved, {other} loaded"
        report = AuditReport(text, tuple(result), (), len(self.elements.names), 0, 0.0, 0.0)
        self._reports.append(report)
        return report

    def _built(self, build: Step) -> Built:
        bound, copied = self._bound(build)
        return Built.of(bound(), copied)

    def _bound(self, function: Step) -> tuple[Callable[[], Any], CopiedBuffers | None]:
        """A rank's function, with a copy of the reference if it takes one, and the copy's buffers."""
        if not inspect.signature(function).parameters:
            return function, None
        model = copy.deepcopy(self._model)
        return lambda: function(model), CopiedBuffers(model)

    def _run(
        self,
        mesh: Mesh,
        recorders: list[Recorder],
        function: Callable[[int], None],
        elements: Elements | None = None,
        reduction: Reduction = reduced,
    ) -> tuple[list[RankEnd], Rendezvous]:
        """Run a function as every rank of a mesh. elements: of the reference as it is."""
        if not self._undo:
            raise UsageError("ranks run inside the audit", hint="with autoshard.audit(...) as a: a.rank(...)")
        threads = RankThreads(mesh.world_size)
        messages, store = Rendezvous(threads, recorders, reduction), new_store()

        def main(rank: int) -> None:
            torch.manual_seed(self._seed)
            join_world(rank, mesh.world_size, store)
            try:
                function(rank)
            finally:
                leave_world()

        with threads_are_ranks():
            ends = threads.run(main, exchange=messages)
        if not any(end.error for end in ends) and not same_values(self._model, elements or self.elements):
            raise UsageError(
                "the ranks changed the reference itself",
                why="they share it: each has to make its parameters of a copy",
                hint="give a function that takes the copy: a.rank(lambda model: ...)",
            )
        return ends, messages

    def report(self) -> str:
        """What was found, as text."""
        return "\n".join(report.text() for report in self._reports)

    def check(self) -> None:
        """Raise VerificationError if ranks differ from the reference.

        Raises:
            VerificationError: with the report.
            UsageError: no rank's step was run.
        """
        if not self._reports:
            raise UsageError("nothing was audited", hint="call a.rank(...) inside the audit")
        if not all(report.ok for report in self._reports):
            first = next(r.findings[0] for r in self._reports if not r.ok)
            raise VerificationError(
                "the ranks do not compute what the reference computes",
                where=first.lines[0] if first.lines else "",
                why=self.report(),
            )

    def _run_reference(self) -> None:
        self.elements = Elements.of(self._model)
        self._recorder = Recorder(keeps_values=True)
        model = copy.deepcopy(self._model)
        self._buffers = values_of(model)
        torch.manual_seed(self._seed)
        try:
            self._left = run_step(
                lambda: self._step(model), self.elements, self._recorder, CopiedBuffers(model)
            )
        except RuntimeError as error:
            if "dtype" not in str(error):
                raise
            raise UsageError(
                "the step of one device fails in float64",
                why=str(error).splitlines()[0],
                hint="give float inputs with batch=, make them inside the audit, or call .double() on them",
            ) from error
        if all(h.gradient is None for h in self._left.parameters):
            raise UsageError("the reference's step leaves no gradients", hint="it runs backward itself")

    def _default_step(self, model: nn.Module) -> None:
        batch = self._batch
        if isinstance(batch, Mapping):
            out = model(**batch)
        else:
            out = model(*batch) if isinstance(batch, tuple) else model(batch)
        loss = getattr(out, "loss", None)
        loss = out if loss is None else loss
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError("the reference returns no loss", hint="give step=lambda model: ....backward()")
        loss.backward()


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def audit_target(
    target: str, mesh: str, *, tolerance: float | None = None, seed: int = 0, prove: bool = True
) -> AuditReport:
    """Audit what a target builds: ``(model, step, rank_step)``, both steps called with a model.

    Raises UsageError if it returns something else.
    """
    ranks = Mesh.parse(mesh)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # also of tensors that the file itself makes
    torch.manual_seed(seed)
    try:
        built = find_callable(target)()
    finally:
        torch.set_default_dtype(default)
    if not (isinstance(built, tuple) and len(built) == 3 and isinstance(built[0], nn.Module)):
        raise UsageError(
            f"{target} does not return (model, step, rank_step)",
            why=f"it returns {type(built).__name__}",
            hint="step(model) is what one device does, rank_step(model) what a rank does with a copy of it",
        )
    model, step, rank_step = built
    with audit(model, ranks, step=step, tolerance=tolerance, seed=seed, prove=prove) as session:
        return session.rank(rank_step)
