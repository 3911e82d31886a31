import my_pool
import pytest

from kvcheck.testing import waits


@pytest.mark.kvcheck_schedules(4)
@pytest.mark.parametrize("kind", ["Pool", "PoolWithoutScale"])
def test_a_request_comes_back(kvcheck_pool, kind):
    pool = getattr(my_pool, kind)()
    kvcheck_pool.round_trip(pool, save=pool.save, load=pool.load, slots=61)


@pytest.mark.parametrize("kind", ["Metadata", "MetadataOfViews"])
def test_metadata_is_owned(kvcheck_pool, kind):
    rows = getattr(my_pool, kind)()
    rows.put(3, 7, 0.5)
    with kvcheck_pool.watch(rows.get(3), of=rows, name="get(3)", owner="request 1"):
        rows.put(3, 8, 0.25)


@pytest.mark.kvcheck_schedules(4)
@pytest.mark.parametrize("kind", ["StreamedPool", "StreamedPoolWithoutWait"])
def test_readers_wait(kvcheck_streams, kind):
    pool = getattr(my_pool, kind)()
    readers = {"keys": pool.keys, "values": pool.values}
    waits(pool, streams=kvcheck_streams, save=pool.save, load=pool.load, read=readers, layers=2, slots=61)
