"""Where we are in the data: exact for any number of ranks, workers and resumes."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, WeightedRandomSampler

from vramfarm import data
from vramfarm.epochs import GlobalBatches, Position, Saved, World


def epoch_of(length, batch_size, plan, *, epoch=0, drop_last=False, shuffle=True):
    """Go through one epoch; `plan` says after how many batches which number of ranks goes on."""
    seen, cursor = [], 0
    for world_size, num_batches in plan:
        ranks = [
            GlobalBatches(length, batch_size, World(r, world_size), shuffle=shuffle, seed=3, drop_last=drop_last)
            for r in range(world_size)
        ]
        for rank in ranks:
            rank.seek(epoch, cursor)
        for parts in itertools.islice(zip(*ranks, strict=True), num_batches):
            assert 1 == len({len(part) for part in parts})  # all ranks have equally many
            seen += [index for row in zip(*parts, strict=True) for index in row]
            cursor += ranks[0].samples_at(cursor)
    return seen, cursor


PLANS = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 5)), max_size=4)


@given(st.integers(1, 200), st.integers(1, 7), PLANS)
@settings(deadline=None)
def test_an_epoch_is_the_same_however_often_and_with_however_many_ranks_it_is_resumed(length, batch_size, plan):
    """
    Every sample once, in one order; only a last short batch may use the epoch's first samples again.
    """
    seen, cursor = epoch_of(length, batch_size, [*plan, (1, 10**6)])
    whole, _ = epoch_of(length, batch_size, [(1, 10**6)])

    assert whole[: min(length, len(seen))] == seen[: min(length, len(seen))][:length]
    assert list(range(length)) == sorted(whole)
    assert length == cursor


@given(st.integers(1, 200), st.integers(1, 7), st.integers(1, 8))
@settings(deadline=None)
def test_the_end_of_an_epoch_is_shared_evenly_or_left_out(length, batch_size, world_size):
    """
    Without drop_last nothing is missing; with it only whole global batches are used.
    """
    everything, _ = epoch_of(length, batch_size, [(world_size, 10**6)])
    whole_batches, _ = epoch_of(length, batch_size, [(world_size, 10**6)], drop_last=True)

    assert set(range(length)) == set(everything)
    assert length <= len(everything) < length + world_size
    assert length - length % (batch_size * world_size) == len(whole_batches)


def test_the_order_is_made_on_the_processor():
    """
    Whatever device the script has as its default: on another one it would be another order, or none.
    """

    def order():
        batches = GlobalBatches(10, 2, World(0, 1), shuffle=True, seed=3, drop_last=False)
        return list(batches)

    with torch.device("meta"):
        found = order()

    assert order() == found


def test_each_epoch_has_another_order():
    """
    The order depends on the seed and the epoch only.
    """
    first, second = (epoch_of(50, 5, [(2, 99)], epoch=e)[0] for e in (0, 1))

    assert first != second
    assert first == epoch_of(50, 5, [(2, 99)], epoch=0)[0]
    assert list(range(50)) == epoch_of(50, 5, [(2, 99)], shuffle=False)[0]


def through(feed, position, num_batches):
    """Consume batches as the Checkpointer does, over epochs."""
    seen = []
    while len(seen) < num_batches:
        for batch in feed.rest_of_epoch(position):
            samples = feed.count(batch, position)
            seen.append(batch[0].tolist())
            position.advance(samples)
            feed.mark()
            if len(seen) == num_batches:
                return seen
        position.next_epoch()
    return seen


def numbers(length=23):
    return TensorDataset(torch.arange(length))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader_goes_on_in_the_middle_of_an_epoch(workers):
    """
    Workers prefetch; what counts is what was consumed.
    """
    loader = DataLoader(numbers(), batch_size=2, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    world = World(1, 2)
    undisturbed = through(data.feed(loader, world, 0, None), Position(), 11)
    position = Position()
    before = through(data.feed(loader, world, 0, None), position, 8)

    resumed = data.feed(loader, world, 0, Saved(position, 2))

    assert undisturbed == before + through(resumed, Position(**position.dump()), 3)
    assert (1, 8, 2, 31) == (position.epoch, position.cursor, position.batches, position.samples)


def test_ranks_see_other_data_even_without_a_distributed_sampler():
    """
    A loader that only shuffles is shared among the ranks all the same.
    """
    loader = DataLoader(numbers(24), batch_size=2, shuffle=True)

    parts = [itertools.chain(*through(data.feed(loader, World(r, 3), 0, None), Position(), 4)) for r in range(3)]

    assert list(range(24)) == sorted(itertools.chain(*parts))


def test_a_sampler_that_knows_nothing_of_ranks_is_noticed():
    """
    Each rank would go through as many samples as one alone.
    """
    one_sampler = WeightedRandomSampler(torch.ones(24), 24)
    loader = DataLoader(numbers(24), batch_size=2, sampler=one_sampler)

    assert data.is_unshared(loader, World(0, 2))
    assert not data.is_unshared(loader, World(0, 1))


def test_a_distributed_sampler_is_replaced():
    """
    Its own position cannot be set, and its order depends on the number of ranks.
    """
    sampler = DistributedSampler(numbers(24), num_replicas=3, rank=1, shuffle=True)
    loader = DataLoader(numbers(24), batch_size=2, sampler=sampler)

    feed = data.feed(loader, World(1, 3), 0, None)

    assert isinstance(feed, data.GlobalFeed)
    assert 4 == feed.num_batches(Position(), 1)


def test_a_distributed_sampler_on_several_ranks_only_leaves_the_order_as_it_is():
    """
    Scripts shuffle by themselves where there is one rank; an epoch that begins there may end on several, or the other way round.
    """
    alone = DataLoader(numbers(24), batch_size=2, shuffle=True)
    shared = DataLoader(numbers(24), batch_size=2, sampler=DistributedSampler(numbers(24), num_replicas=2, rank=0))

    position = Position()
    before = [through(data.feed(shared, World(r, 2), 0, None), Position(), 4) for r in range(2)]
    through(data.feed(shared, World(0, 2), 0, None), position, 4)
    rest = through(data.feed(alone, World(0, 1), 0, Saved(position, 2)), position, 4)

    assert list(range(24)) == sorted(itertools.chain(*before[0], *before[1], *rest))


def test_drawing_an_epoch_leaves_the_scripts_random_numbers_alone():
    """
    Else a run that resumes in an epoch would go on with other numbers than one that does not.
    """
    for loader in (
        DataLoader(numbers(), batch_size=2, shuffle=True),
        DataLoader(numbers(), batch_size=2, sampler=[3, 1, 2]),
    ):
        torch.manual_seed(5)
        through(data.feed(loader, World(0, 1), 0, None), Position(), 2)
        assert 5 == torch.initial_seed()
        after = torch.rand(1)
        torch.manual_seed(5)
        assert after == torch.rand(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_a_generator_begins_whatever_the_default_device_is(workers):
    """
    Its order is ours, and so are the numbers that beginning an epoch draws: they are the processor's.
    """

    def make():
        generator = torch.Generator(device="cpu")
        return DataLoader(
            list(range(23)), batch_size=2, shuffle=True, generator=generator, num_workers=workers, collate_fn=list
        )

    def batches(loader):
        return list(data.feed(loader, World(0, 1), 0, None).rest_of_epoch(Position()))

    with torch.device("meta"):
        found = batches(make())
        made = torch.empty(1).device.type

    assert "meta" == made
    assert batches(make()) == found


def test_drawing_an_epoch_leaves_the_cards_random_numbers_alone():
    """
    A loader whose order is its own gets a seed an epoch; dropout on a card must not begin anew with it.
    """
    loader = DataLoader(numbers(), batch_size=2, sampler=[3, 1, 2])
    torch.manual_seed(1)
    queued = torch.cuda._lazy_seed_tracker.manual_seed_all_cb  # what waits for a card to be there
    through(data.feed(loader, World(0, 1), 0, None), Position(), 2)

    assert queued is torch.cuda._lazy_seed_tracker.manual_seed_all_cb
    assert queued is not None


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(20))


def test_a_stream_is_gone_through_again():
    """
    What cannot begin in the middle skips what was consumed, by all ranks together.
    """
    loader = DataLoader(Stream(), batch_size=2)
    position = Position()
    take = itertools.islice(data.feed(loader, World(0, 2), 0, None).rest_of_epoch(position), 2)
    for batch in take:
        position.advance(data.batch_length(batch) * 2)

    same = data.feed(loader, World(0, 2), 0, Saved(position, 2))
    fewer = data.feed(loader, World(0, 1), 0, Saved(position, 2))

    assert [4, 5] == next(same.rest_of_epoch(Position(**position.dump()))).tolist()
    assert [8, 9] == next(fewer.rest_of_epoch(Position(**position.dump()))).tolist()
    assert "skipping" in same.note


class Stateful:
    """As torchdata's StatefulDataLoader: knows by itself where it is."""

    def __init__(self):
        self.at = 0
        self.resume_at = None

    def __iter__(self):
        self.at, self.resume_at = self.resume_at or 0, None
        while self.at < 10:
            self.at += 1
            yield torch.tensor([self.at])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.resume_at = state["at"]


def test_a_loader_with_a_state_of_its_own_keeps_it():
    """
    Its state is restored for the same number of ranks; else it is gone through by batches.
    """
    feed, position = data.feed(Stateful(), World(0, 1), 0, None), Position()
    for batch in itertools.islice(feed.rest_of_epoch(position), 3):
        position.advance(feed.count(batch, position))
        feed.mark()

    same = data.feed(Stateful(), World(0, 1), 0, Saved(position, 1, feed.state()))
    other = data.feed(Stateful(), World(0, 2), 0, Saved(position, 1, None))

    assert 4 == next(same.rest_of_epoch(Position(**position.dump()))).item()
    assert 2 == next(other.rest_of_epoch(Position(**position.dump()))).item()
    assert "by the loader's own state" == same.note
    assert "another number of ranks; 1 of them come again" in other.note


class Own(DataLoader):
    """Does something of its own to each batch."""

    def __iter__(self):
        yield from super().__iter__()


def all_ranks(dataset, world_size, num_batches, batch_size, saved=None):
    """The samples of so many batches on each rank, where that ended, and what is said of the beginning."""
    seen = []
    for rank in range(world_size):
        sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, seed=3)
        loader = Own(dataset, batch_size=batch_size, sampler=sampler)
        feed, position = data.feed(loader, World(rank, world_size), 0, saved), Position()
        if saved is not None:
            position = Position(**saved.position.dump())
        for (batch,) in itertools.islice(feed.rest_of_epoch(position), num_batches):
            seen += batch.tolist()
            position.advance(len(batch) * world_size)
    return seen, Saved(position, world_size, None, feed.order), feed.note


@pytest.mark.parametrize(
    ("length", "ranks", "batch_sizes", "num_batches", "again"),
    [
        pytest.param(240, (2, 3), (4, 4), 20, 4, id="some come again"),
        pytest.param(240, (1, 4), (4, 4), 3, 12, id="the whole beginning"),
        pytest.param(240, (4, 2), (4, 4), 5, 0, id="fewer ranks, exactly"),
        pytest.param(240, (1, 1), (4, 3), 5, 2, id="another batch size"),
        pytest.param(24, (2, 4), (4, 4), 3, 0, id="the epoch was over"),
        pytest.param(20, (2, 1), (4, 2), 3, 0, id="over, with a short batch at its end"),
    ],
)
def test_samples_that_come_again_on_another_number_of_ranks_are_counted(length, ranks, batch_sizes, num_batches, again):
    """
    A loader whose order is its own goes on by whole batches of all ranks: the report says what that repeats, and nothing is left out.
    """
    dataset = numbers(length)
    before, saved, _ = all_ranks(dataset, ranks[0], num_batches, batch_sizes[0])
    after, ended, note = all_ranks(dataset, ranks[1], length, batch_sizes[1], saved)

    assert set(range(length)) == {*before, *after}
    assert again == len(set(before) & set(after))
    assert (f"{again} of them come again" in note) == (again > 0)
    assert length == ended.position.cursor


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 4),
    st.integers(0, 5),
    st.booleans(),
)
def test_a_step_takes_the_same_samples_however_many_ranks_share_the_global_batch(before, now, per_card, step, shuffle):
    """
    Fewer ranks accumulate more: eight micro-batches in every optimizer step.
    """

    def samples(ranks):
        accumulation = 8 // ranks
        batches = [
            list(GlobalBatches(96 * per_card, per_card, World(r, ranks), shuffle=shuffle, seed=3, drop_last=False))
            for r in range(ranks)
        ]
        first = step * accumulation
        return sorted(i for rank in batches for batch in rank[first : first + accumulation] for i in batch)

    assert 8 * per_card == len(samples(now))
    assert samples(before) == samples(now)
