"""SGLang's session of weight updates over a target and its draft (from 0.5.21 on): one update of both."""

import sys

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4, mxfp4_reload
from sglang_aiter_moe.srt.model_executor.model_runner_components import weight_updater
from sglang_aiter_moe.testing.loaded_layers import load, random_raw
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.updated_model import GATE, SPEC, Updater, never

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

DONE = (True, "done")


class Pair:
    """Two models in one session, from 0.5.21 on; both hold one more tensor, which they share."""

    def __init__(self, *, laid_out=True):
        self.target, self.draft = Updater(), Updater() if laid_out else PlainDraft()
        self.shared = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        for updater in (self.target, self.draft):
            updater.whole.shared = self.shared
        self.names = [(GATE, torch.zeros(2, 2)), ("shared", torch.zeros(2))]

    def run(self, draft_step):
        """The target's step, which goes well, then the draft's; what they answered."""
        for updater in (self.target, self.draft):
            weight_updater.begin_session(lambda _: None, updater)
        answers = [
            weight_updater.from_tensor(self.write(self.target), self.target, self.names),
            weight_updater.from_tensor(draft_step, self.draft, self.names),
        ]
        for updater in (self.target, self.draft):
            weight_updater.end_session(lambda _: None, updater)
        assert not mxfp4_reload.RUNNING.models and mxfp4_reload.RUNNING.depth == 0
        return answers

    def write(self, updater, result=DONE):
        def original(*_):
            updater.gate.data.fill_(7)
            self.shared.fill_(7 if updater is self.target else 8)
            if isinstance(updater, Updater):
                load(updater.experts, random_raw(SPEC, 2))
            return result

        return original


class PlainDraft:
    """A draft without experts."""

    def __init__(self):
        self.whole = torch.nn.Module()
        self.whole.gate = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)

    @property
    def gate(self):
        return self.whole.gate

    def get_model(self):
        return self.whole


@pytest.mark.parametrize("laid_out", [True, False])
@pytest.mark.parametrize("refused", [True, False])
def test_what_fails_in_the_draft_is_undone_in_the_target(monkeypatch, refused, laid_out):
    """Its router too, which chooses among the old experts again."""
    monkeypatch.setenv(mxfp4_reload.STAGING, "host")
    pair = Pair(laid_out=laid_out)
    gates = [updater.gate.clone() for updater in (pair.target, pair.draft)]
    if refused:
        monkeypatch.setattr(weight_updater, "failure_elsewhere", elsewhere_at(3))
    ended = pair.run(never if refused else pair.write(pair.draft, (False, "draft failed")))
    assert [success for success, _ in ended] == [True, False]
    assert pair.target.unchanged and torch.equal(pair.shared, torch.ones(2))
    assert torch.equal(pair.target.gate, gates[0]) and torch.equal(pair.draft.gate, gates[1])
    mxfp4.moe_quant_info(pair.target.experts)


def elsewhere_at(call):
    """Another rank's failure at one of the exchanges (each step that goes well has two)."""
    calls = []

    def failure_elsewhere(reason):
        calls.append(reason)
        return "rank 1: no" if len(calls) == call else None

    return failure_elsewhere


@pytest.mark.parametrize("laid_out", [True, False])
def test_without_copies_the_target_refuses_after_a_failure_of_the_draft(monkeypatch, laid_out):
    monkeypatch.delenv(mxfp4_reload.STAGING, raising=False)
    pair = Pair(laid_out=laid_out)
    pair.run(pair.write(pair.draft, (False, "draft failed")))
    with pytest.raises(ContractError, match="draft failed; 2 tensors beside the experts are open"):
        mxfp4.moe_quant_info(pair.target.experts)


@pytest.mark.parametrize("laid_out", [True, False])
def test_a_session_of_both_that_goes_well_is_kept(monkeypatch, laid_out):
    monkeypatch.setenv(mxfp4_reload.STAGING, "host")
    pair = Pair(laid_out=laid_out)
    assert pair.run(pair.write(pair.draft)) == [DONE, DONE]
    assert not pair.target.unchanged and torch.equal(pair.shared, torch.full((2,), 8.0))
    # Its copies are gone: a later update is undone to what the session wrote.
    failing = pair.write(pair.target, (False, "lost"))
    assert weight_updater.from_tensor(failing, pair.target, pair.names) == (False, "lost")
    assert torch.equal(pair.shared, torch.full((2,), 8.0))


@pytest.mark.parametrize("laid_out", [True, False])
def test_after_a_failure_in_the_target_the_draft_is_not_written_either(monkeypatch, laid_out):
    monkeypatch.setenv(mxfp4_reload.STAGING, "host")
    pair = Pair(laid_out=laid_out)
    weight_updater.begin_session(lambda _: None, pair.target)
    failing = pair.write(pair.target, (False, "target failed"))
    assert not weight_updater.from_tensor(failing, pair.target, pair.names)[0]
    success, message = weight_updater.from_tensor(never, pair.draft, pair.names)
    assert not success and "target failed" in message
    weight_updater.end_session(lambda _: None, pair.target)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
