"""The scheduler: plans under budgets of tokens, slots and blocks; order, preemption, and that nothing ever hangs."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from kvcache.errors import CorruptState
from kvcache.request import TRANSITIONS, Action, State, advance
from kvcache.scheduler import Entry, MemberShape, Scheduler, Slice


def scheduler(num_blocks: int = 100, *, tokens: int = 8, sequences: int = 4, block_size: int = 4) -> Scheduler:
    return Scheduler([MemberShape(block_size, num_blocks)], tokens, sequences)


def added(planner: Scheduler, number: int, num_tokens: int, priority: int = 0) -> Entry:
    entry = Entry(number, priority, number, num_tokens)
    planner.add(entry)
    return entry


def running(planner: Scheduler, number: int, num_tokens: int, num_computed: int = 0, priority: int = 0) -> Entry:
    entry = added(planner, number, num_tokens, priority)
    planner.admit(entry, num_computed)
    entry.copies_tail = False
    if num_tokens == num_computed + 1:
        planner.computed(entry)
    return entry


# --- states -----------------------------------------------------------------------------------------------------------


def test_every_state_is_reached_and_final_ones_are_final() -> None:
    assert {state for state, _ in TRANSITIONS} == {State.WAITING, State.PREFILL, State.DECODE}
    assert set(TRANSITIONS.values()) == set(State)
    for final in (State.FINISHED, State.ABORTED):
        with pytest.raises(CorruptState, match="final"):
            advance(final, Action.ADMIT)
    with pytest.raises(CorruptState, match=r"'waiting' met 'finish'.*admit, abort"):
        advance(State.WAITING, Action.FINISH)


def test_scheduler_and_request_load_no_tensor_library() -> None:
    program = (
        "import sys, kvcache.scheduler, kvcache.prefix; print('torch' in sys.modules, 'tokenizers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# --- plans ------------------------------------------------------------------------------------------------------------


def test_decodes_and_a_chunk_of_a_prompt_share_a_step() -> None:
    planner = scheduler()
    running(planner, 0, 11, 10)
    running(planner, 1, 21, 20)
    running(planner, 2, 20)
    assert planner.plan([100]).slices == [Slice(0, 1), Slice(1, 1), Slice(2, 6)]


def test_prompts_are_served_by_priority_then_arrival() -> None:
    planner = scheduler()
    running(planner, 0, 5)
    running(planner, 1, 6)
    running(planner, 2, 5, priority=1)
    assert planner.plan([100]).slices == [Slice(2, 5), Slice(0, 3)]
    assert [entry.number for entry in planner.waiting()] == []
    waiting = scheduler()
    for number, priority in enumerate((0, 2, 0, 2)):
        added(waiting, number, 3, priority)
    assert [entry.number for entry in waiting.waiting()] == [1, 3, 0, 2]


def test_stops_end_a_chunk() -> None:
    planner = scheduler()
    entry = running(planner, 0, 20)
    entry.stops = (4, 6)
    assert planner.plan([100]).slices == [Slice(0, 4)]
    entry.num_computed = 4
    assert planner.plan([100]).slices == [Slice(0, 2)]
    entry.num_computed = 6
    assert planner.plan([100]).slices == [Slice(0, 8)]


def test_what_goes_on_by_single_tokens_begins_with_more_than_a_step_holds() -> None:
    planner = Scheduler([MemberShape(4, 100)], 8, 4, beginning=40)
    running(planner, 0, 6, 5)
    first, second = running(planner, 1, 33), running(planner, 2, 20)
    first.stops = (32, 12)  # a state at 12 would leave too many tokens that go one by one
    assert planner.plan([100]).slices == [Slice(0, 1), Slice(1, 32)]  # the other one waits a step
    first.num_computed = 32
    planner.computed(first)
    second.stops = (16, 18)
    assert planner.plan([100]).slices == [Slice(0, 1), Slice(1, 1), Slice(2, 18)]
    assert planner.plan([5]).slices == [Slice(0, 1), Slice(1, 1)]  # not a part of it, beside others
    second.num_computed = 18
    assert planner.plan([100]).slices == [Slice(0, 1), Slice(1, 1), Slice(2, 2)]
    longer = Scheduler([MemberShape(4, 100)], 8, 4, beginning=40)
    entry = running(longer, 0, 101)
    entry.stops = (100, 8)
    assert longer.plan([100]).slices == [Slice(0, 40)]
    assert longer.plan([5]).slices == [Slice(0, 20)]  # alone, it takes what there is
    entry.stops = (100, 92)
    longer.beginning = longer.max_batch_tokens = 200
    assert longer.plan([100]).slices == [Slice(0, 92)]  # a state that another one waits for
    entry.stops = (100, 8)
    assert longer.plan([100]).slices == [Slice(0, 100)]


def test_a_chunk_shrinks_to_the_free_blocks() -> None:
    planner = scheduler(tokens=64)
    entry = running(planner, 0, 40, 6)
    assert planner.plan([3]).slices == [Slice(0, 14)]  # 2 in the last block, 12 in three
    entry.copies_tail = True
    assert planner.plan([3]).slices == [Slice(0, 10)]  # one of the three becomes a copy of the last
    assert planner.plan([0]).stuck == 0


def test_the_last_is_preempted_for_the_first() -> None:
    planner = scheduler()
    running(planner, 0, 9, 8)  # needs a block
    running(planner, 1, 7, 6)
    running(planner, 2, 7, 6, priority=3)
    plan = planner.plan([0])
    assert (plan.preempt, plan.slices) == (1, [])
    planner.leave(1, Action.PREEMPT)
    waiting = next(planner.waiting())
    assert (waiting.number, waiting.num_tokens, waiting.num_computed) == (1, 7, 0)
    assert planner.plan([1]).slices == [Slice(2, 1), Slice(0, 1)]


def test_those_behind_a_prompt_are_preempted_for_its_blocks() -> None:
    planner = scheduler()
    running(planner, 0, 20, 8, priority=1)
    running(planner, 1, 7, 6)  # has room in its block
    assert planner.plan([0]).preempt == 1
    assert planner.plan([1]).slices == [Slice(1, 1), Slice(0, 4)]
    busy = scheduler(tokens=1)
    running(busy, 0, 20, 8, priority=1)
    running(busy, 1, 7, 6)
    assert busy.plan([0]).slices == [Slice(1, 1)]  # it is tokens that it waits for


@pytest.mark.parametrize(("wanted", "given"), [(3, [3, 1, 0, 0]), (1, [1, 1, 1, 1])])
def test_guesses_fill_what_a_step_has_left(wanted: int, given: list[int]) -> None:
    planner = scheduler()
    for number in range(4):
        running(planner, number, 11, 10).num_drafts = wanted
    assert [part.num_drafts for part in planner.plan([100]).slices] == given


def test_prompts_that_hold_the_pool_between_them_do_not_hang() -> None:
    planner = scheduler()
    running(planner, 0, 20, 8)
    running(planner, 1, 20, 8)
    assert planner.plan([0]).preempt == 1
    planner.leave(1, Action.PREEMPT)
    assert planner.plan([2]).slices == [Slice(0, 8)]


def test_admission_leaves_room_for_those_who_run() -> None:
    planner = scheduler(num_blocks=10)
    newcomer = added(planner, 5, 20)
    assert planner.can_admit(newcomer, 0, [6])  # alone: always
    running(planner, 0, 9, 8)
    assert planner.can_admit(newcomer, 0, [7])  # six blocks for 21 tokens, and one in reserve
    assert not planner.can_admit(newcomer, 0, [6])
    assert planner.can_admit(newcomer, 12, [4])
    newcomer.num_slots = 4
    assert not planner.can_admit(newcomer, 0, [50])  # four samples, three slots


def test_what_is_promised_to_prompts_under_way_is_not_promised_twice() -> None:
    planner = scheduler(num_blocks=10)
    first, second = added(planner, 0, 20), added(planner, 1, 10)
    assert planner.can_admit(first, 0, [10])
    planner.admit(first, 0)  # six blocks for 21 tokens
    assert planner.can_admit(second, 0, [10])  # three, and one in reserve
    assert not planner.can_admit(second, 0, [9])
    first.num_computed = 8
    assert planner.can_admit(second, 0, [8])
    first.num_slots = 2  # a sample is still to begin
    assert not planner.can_admit(second, 0, [9])
    window = MemberShape(4, 10, num_retained=8)
    assert (window.blocks_to_finish(0, 21, 8), window.blocks_to_finish(12, 21, 8)) == (6, 3)
    assert window.blocks_to_finish(12, 99, 8) == 4  # of six, it holds two


def test_windows_bound_what_a_sequence_needs() -> None:
    shape = MemberShape(4, 12, num_retained=9)
    assert shape.blocks_to_finish(0, 400, 8) == 7
    assert shape.blocks_to_finish(0, 8, 8) == 2
    assert shape.capacity() is None
    assert MemberShape(4, 4, num_retained=9).capacity() == 12
    assert MemberShape(4, 12).capacity() == 44
    assert Scheduler([shape, MemberShape(4, 12)], 8, 4).capacity() == 44


def test_samples_take_the_slots_that_were_kept_for_them() -> None:
    planner = scheduler()
    entry = Entry(0, 0, 0, 6, num_slots=3)
    planner.add(entry)
    planner.admit(entry, 0)
    entry.num_computed = 6
    planner.computed(entry)
    copies = [planner.fork(entry, number) for number in (7, 8)]
    assert entry.num_slots == 1 and planner.num_running == 3
    assert all(copy.state is State.DECODE and copy.copies_tail and copy.num_computed == 6 for copy in copies)
    for each in (entry, *copies):
        each.num_tokens = 7
    assert len(planner.plan([2]).slices) == 0  # each needs a copy of the last block
    assert len(planner.plan([3]).slices) == 3
    assert planner.has_slot


def test_a_party_that_has_the_pool_to_itself_is_stuck() -> None:
    """Beams do not preempt each other: none of them could go on without the others."""
    planner = scheduler(sequences=8)
    entry = running(planner, 0, 9, 8)
    planner.fork(entry, 5, is_party=True)
    assert planner.is_alone and planner.plan([1]).stuck in (0, 5)
    stranger = added(planner, 9, 9)
    planner.admit(stranger, 8)
    assert not planner.is_alone and planner.plan([1]).preempt == 9


def test_sequences_that_share_only_a_prompt_share_the_rest_of_the_pool() -> None:
    shape = MemberShape(4, 20)
    assert shape.capacity(1, 9) == 4 * 19
    assert shape.capacity(4, 9) == 4 * (2 + (20 - 2 - 4) // 4)  # two blocks shared, one each kept for a copied tail
    assert shape.capacity(4, 79) == 4 * 19 - 4  # less than the prompt: refused
    assert MemberShape(4, 20, num_retained=9).capacity(4) is None
    assert MemberShape(4, 19, num_retained=9).capacity(4) == 12


# --- a simulation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_retained", [None, 10])
def test_every_request_finishes_whatever_the_pool(seed: int, num_retained: int | None) -> None:
    """Exact block counts, random lengths, arrivals and priorities, pools from too small to ample: all are served."""
    chance = random.Random(seed)
    num_blocks = chance.randrange(6, 40)
    shape = MemberShape(4, num_blocks, num_retained)
    planner = Scheduler([shape], chance.randrange(3, 20), chance.randrange(1, 6))
    longest = min(planner.capacity() or 60, 60)
    wanted: dict[int, int] = {}
    held: dict[int, int] = {}
    served: set[int] = set()
    num_steps = 0
    while len(served) < 20:
        if len(wanted) < 20 and chance.random() < 0.5:
            number = len(wanted)
            total = chance.randrange(2, longest + 1)
            wanted[number] = total
            planner.add(Entry(number, chance.randrange(2), number, chance.randrange(1, total)))
        for entry in planner.waiting():
            if not planner.has_slot or not planner.can_admit(entry, 0, [num_blocks - sum(held.values())]):
                break
            planner.admit(entry, 0)
            held[entry.number] = 0
        while True:
            plan = planner.plan([num_blocks - sum(held.values())])
            assert plan.stuck is None
            if plan.preempt is None:
                break
            assert plan.preempt == planner.last_running() and planner.num_running > 1
            planner.leave(plan.preempt, Action.PREEMPT)
            del held[plan.preempt]
        assert sum(part.num_tokens for part in plan.slices) <= planner.max_batch_tokens
        assert bool(plan.slices) == bool(planner.num_running)
        for number, num_tokens, _ in plan.slices:
            entry = planner.entries[number]
            begin, end = entry.num_computed, entry.num_computed + num_tokens
            entry.num_computed = end
            first = 0 if num_retained is None else max(0, begin - num_retained + 1) // 4
            held[number] = -(-end // 4) - first
            if not entry.num_missing:
                if entry.state is State.PREFILL:
                    planner.computed(entry)
                entry.num_tokens += 1
                if entry.num_tokens >= wanted[number]:
                    planner.leave(number, Action.FINISH)
                    del held[number]
                    served.add(number)
        assert sum(held.values()) <= num_blocks
        num_steps += 1
        assert num_steps < 5000, "it hangs"
    assert not planner.entries and not planner.num_waiting and not planner.num_running
