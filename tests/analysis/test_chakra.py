"""Execution traces parsed back by protobuf itself from a description of the schema written here, field by field."""

import random
from dataclasses import replace
from operator import attrgetter

import pytest

from analysis.chakra import carried, rank_nodes, write_chakra
from kfac.planning import ClusterProfile, LinearCost, ModelProfile, PolynomialCost
from kfac.planning.profiles import LayerProfile
from kfac.schedules import make_plan
from kfac.simulation import simulate
from kfac.timeline import Span, Timeline
from tests.kfac.simulation.cases import random_cluster, random_model, random_schedule

descriptor = pytest.importorskip("google.protobuf.descriptor_pb2", reason="protobuf checks the files where it is")
COMP, COLL = 4, 7  # NodeType
ALL_REDUCE, BROADCAST = 0, 5  # CollectiveCommType


@pytest.fixture(scope="module")
def schema():
    """The messages of Chakra's et_def.proto (0.0.4) that a trace of computing and collectives needs."""
    from google.protobuf import descriptor_pool, message_factory

    kinds = descriptor.FieldDescriptorProto
    file = descriptor.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")

    def message(name, *fields):
        made = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            new = made.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                new.type, new.type_name = kinds.TYPE_MESSAGE, f".ChakraProtoMsg.{kind}"
            else:
                new.type = kind

    message(
        "AttributeProto",
        ("name", 1, kinds.TYPE_STRING, False),
        ("doc_string", 2, kinds.TYPE_STRING, False),
        ("double_val", 3, kinds.TYPE_DOUBLE, False),
        ("int64_val", 9, kinds.TYPE_INT64, False),
        ("uint64_val", 13, kinds.TYPE_UINT64, False),
        ("bool_val", 27, kinds.TYPE_BOOL, False),
        ("string_val", 29, kinds.TYPE_STRING, False),
    )
    attribute = file.message_type[0]
    attribute.oneof_decl.add(name="value")
    for field in attribute.field:
        if field.name.endswith("_val"):
            field.oneof_index = 0
    message("GlobalMetadata", ("version", 1, kinds.TYPE_STRING, False), ("attr", 2, "AttributeProto", True))
    message(
        "Node",
        ("id", 1, kinds.TYPE_UINT64, False),
        ("name", 2, kinds.TYPE_STRING, False),
        ("type", 3, kinds.TYPE_INT32, False),  # an enumeration: the same on the wire
        ("ctrl_deps", 4, kinds.TYPE_UINT64, True),
        ("data_deps", 5, kinds.TYPE_UINT64, True),
        ("start_time_micros", 6, kinds.TYPE_UINT64, False),
        ("duration_micros", 7, kinds.TYPE_UINT64, False),
        ("attr", 10, "AttributeProto", True),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in ("GlobalMetadata", "Node")
    }


def read(path, schema):
    """The metadata and the nodes of a file; nothing in it may be unknown to the schema."""
    data, messages = path.read_bytes(), []
    while data:
        size = shift = place = 0
        while True:
            byte = data[place]
            size, shift, place = size | (byte & 127) << shift, shift + 7, place + 1
            if byte < 128:
                break
        made = schema["Node" if messages else "GlobalMetadata"]()
        assert made.ParseFromString(data[place : place + size]) == size
        assert made.SerializeToString() == made.FromString(made.SerializeToString()).SerializeToString()
        made.DiscardUnknownFields()
        assert made.ByteSize() == size, "a field that the schema has not"
        messages.append(made)
        data = data[place + size :]
    return messages[0], messages[1:]


def attributes(node):
    return {a.name: next(getattr(a, f.name) for f, _ in a.ListFields() if f.name != "name") for a in node.attr}


def value(node, name):
    (found,) = [a for a in node.attr if a.name == name]
    return found


BY_HAND = Timeline(
    (
        Span(0, "compute", "FF", "conv é", 0, 0.0000026),
        Span(0, "compute", "BP", "conv", 0.0000026, 0.0006),
        Span(0, "communication", "FactorComm", "A message 0 (1 items)", 0.0000026, 0.0004),
        Span(0, "communication", "GradComm", "gradient message 1 (1 items)", 0.0006, 0.0009),
        Span(0, "compute", "InverseComp", "invert A of conv", 0.0009, 0.0015),
        Span(0, "communication", "InverseComm", "inverse of A of conv", 0.0015, 0.002),
        Span(0, "compute", "Precondition", "conv", 0.002, 0.5),
        Span(2, "compute", "FF", "conv é", 0, 0.0000026),
    ),
    {0: 1, 2: 3},
)


def test_a_trace_by_hand_read_back(tmp_path, schema):
    written = write_chakra(BY_HAND, tmp_path / "folder" / "trace")
    # Rank 2 stands for 3: itself and the two that are free.
    assert [p.name for p in written] == [f"trace.{rank}.et" for rank in range(4)]
    assert written[1].read_bytes() == written[2].read_bytes() == written[3].read_bytes()
    metadata, nodes = read(written[0], schema)
    assert metadata.version == "0.0.4"
    assert [(n.id, n.name, n.type, n.start_time_micros, n.duration_micros) for n in nodes] == [
        (0, "conv é", COMP, 0, 3),
        (1, "A message 0 (1 items)", COLL, 3, 397),
        (2, "conv", COMP, 3, 597),
        (3, "gradient message 1 (1 items)", COLL, 600, 300),
        (4, "invert A of conv", COMP, 900, 600),
        (5, "inverse of A of conv", COLL, 1500, 500),
        (6, "conv", COMP, 2000, 498000),
    ]
    # Each waits for its lane; messages for the computing before them, computing in the step for messages.
    assert [list(n.data_deps) for n in nodes] == [[], [0], [0], [1, 2], [2, 3], [3, 4], [4, 5]]
    assert not any(n.ctrl_deps for n in nodes)
    assert not any(value(n, "is_cpu_op").bool_val for n in nodes)
    assert [attributes(n).get("kind") for n in nodes][1] == "FactorComm"
    assert value(nodes[3], "comm_type").int64_val == ALL_REDUCE
    assert value(nodes[5], "comm_type").int64_val == BROADCAST
    assert not [a for n in nodes for a in n.attr if a.name == "comm_size"], "no plan, no sizes"


@pytest.fixture(scope="module")
def simulated():
    keys = ("forward_s", "backward_s", "a_statistics_s", "g_statistics_s", "precondition_s")
    seconds = dict(zip(keys, (1e-3, 2e-3, 1e-3, 1e-3, 5e-4), strict=True))
    layers = tuple(
        LayerProfile(name=f"layer{i}", a_dim=40 + 30 * i, g_dim=50, gradient_elements=4000 + 1500 * i, **seconds)
        for i in range(4)
    )
    model = ModelProfile(name="m", layers=layers, loss_s=1e-4, update_s=1e-4)
    line, cube = LinearCost(1e-4, 1e-8), PolynomialCost((1e-4, 0.0, 0.0, 1e-8))
    cluster = ClusterProfile(world_size=4, all_reduce=line, reduce=line, broadcast=line, inverse=cube)
    plan = make_plan("mpdkfac", model, cluster)
    return plan, simulate(plan, model, cluster)


def test_a_plan_gives_every_message_its_size_and_the_dependencies_form_no_circle(tmp_path, schema, simulated):
    plan, timeline = simulated
    paths = write_chakra(timeline, tmp_path / "t", carried(plan))
    assert len(paths) == plan.world_size
    collectives = []
    for path in paths:
        _, nodes = read(path, schema)
        assert [n.id for n in nodes] == list(range(len(nodes)))
        assert all(dep < n.id for n in nodes for dep in n.data_deps)
        moving = [n for n in nodes if n.type == COLL]
        collectives.append([(n.name, value(n, "comm_type").int64_val, value(n, "comm_size").int64_val) for n in moving])
    # Every rank takes part in the same collectives in the same order: else a simulator waits for ever.
    assert all(of == collectives[0] for of in collectives)
    sums = sum(size for _, kind, size in collectives[0] if kind == ALL_REDUCE)
    assert sums == 4 * sum(message.elements for message in plan.messages)
    sent = sum(size for _, kind, size in collectives[0] if kind == BROADCAST)
    assert sent == 4 * sum(factor.elements for factor in plan.factors)


def test_dependencies_allow_the_timeline(simulated):
    """With the spans' own durations, starting each node when all it waits for has ended is never later than it was."""
    _, timeline = simulated
    for rank in timeline.ranks:
        ends = []
        for node in rank_nodes(timeline, rank, {}):
            start = max((ends[dep] for dep in node.data_deps), default=0)
            assert start <= node.start_us
            ends.append(start + node.duration_us)


def replayed(timeline, duration_us):
    """When each span starts if it waits for nothing but what its trace says, collectives for all ranks."""
    nodes = {rank: rank_nodes(timeline, rank, {}) for rank in timeline.ranks}
    ends = {rank: {} for rank in nodes}
    starts = {}
    at = dict.fromkeys(nodes, 0)

    def key(rank, node):
        return rank, node.attributes["kind"], node.name

    def ready(rank):
        node = nodes[rank][at[rank]]
        return max((ends[rank][dep] for dep in node.data_deps), default=0)

    def take(rank, start):
        node = nodes[rank][at[rank]]
        starts[key(rank, node)] = start
        ends[rank][node.id] = start + duration_us[key(rank, node)]
        at[rank] += 1

    while any(at[rank] < len(of) for rank, of in nodes.items()):
        alone = [r for r, of in nodes.items() if at[r] < len(of) and of[at[r]].type == COMP]
        for rank in alone:
            take(rank, ready(rank))
        if not alone:  # every rank has come to a collective, the same one
            assert len({of[at[rank]].name for rank, of in nodes.items()}) == 1
            start = max(ready(rank) for rank in nodes)
            for rank in nodes:
                take(rank, start)
    return starts


def moments_us(timeline, moment):
    found = {(s.rank, s.kind, s.name): round(1e6 * moment(s)) for s in timeline.spans}
    assert len(found) == len(timeline.spans)
    return found


def other_machine(seed, schedule=None):
    """One plan on two machines at random: what the first one's trace makes of the second's seconds, and what is so."""
    dice = random.Random(seed)
    model, slower, world_size = random_model(dice), random_model(dice), dice.randint(2, 4)
    cluster, other = random_cluster(dice, world_size), random_cluster(dice, world_size)
    schedule = schedule or random_schedule(dice)
    if schedule != "spdkfac" and schedule.factor_collective == "none":
        # A step waits for the passes of all ranks, which is no message.
        schedule = replace(schedule, factor_collective="all_reduce")
    plan = make_plan(schedule, model, cluster, world_size)
    keys = ("forward_s", "backward_s", "a_statistics_s", "g_statistics_s", "precondition_s")
    layers = tuple(
        replace(a, **{key: getattr(b, key) for key in keys}) for a, b in zip(model.layers, slower.layers, strict=True)
    )
    there = simulate(plan, replace(model, layers=layers), other)
    return simulate(plan, model, cluster), there


@pytest.mark.parametrize("seed", range(60))
def test_a_simulations_trace_is_the_whole_graph(seed):
    """Another simulator that gives the nodes other seconds comes to what ours says of such a machine."""
    here, there = other_machine(seed)
    for timeline in (here, there):
        assert replayed(here, moments_us(timeline, attrgetter("duration_s"))) == moments_us(
            timeline, attrgetter("start_s")
        )


def test_control_guessed_dependencies_are_those_of_one_machine():
    wrong = 0
    for seed in range(30):
        here, there = other_machine(seed, "spdkfac")
        guessed = replace(here, flows=())
        seconds, starts = (moments_us(there, attrgetter(of)) for of in ("duration_s", "start_s"))
        assert replayed(here, seconds) == starts
        wrong += replayed(guessed, seconds) != starts
    assert wrong > 15


def test_long_timelines_are_written(tmp_path):
    spans = [Span(0, "compute", "FF", f"op {i}", i / 1000, (i + 1) / 1000) for i in range(5000)]
    spans += [Span(0, "communication", "GradComm", f"m {i}", i / 1000, (i + 1) / 1000) for i in range(5000)]
    (path,) = write_chakra(Timeline(tuple(spans)), tmp_path / "t")
    assert path.stat().st_size > 10_000 * 20


def test_an_empty_timeline_is_refused(tmp_path):
    with pytest.raises(ValueError, match="without spans"):
        write_chakra(Timeline(()), tmp_path / "t")
