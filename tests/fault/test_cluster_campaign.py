"""A cluster under faults, drawn from a seed (tests/lib/campaign.py): daemons killed, paused and cut off from etcd and from each other,
members of etcd stopped and paused, also while jobs are being taken over, clocks that jump, disks that are slow, an object storage that
hangs, fails and hurts bytes; a former owner that is stopped at its commit comes back when its job has a new one.

`make check-cluster` has the long form, with fault points; CAMPAIGN_SEED and CAMPAIGN_ROUNDS choose another one.
"""
import json
import os

import pytest
from campaign import HAS_POINTS, Campaign

KINDS = ["none", "kill", "pause", "pause", "hold", "hold", "hold", "cut", "cut off", "cut all", "mute", "etcd member", "etcd",
         "kill and etcd", "kill two", "clock", "clock and kill", "slow disk", "slow disk and pause", "s3 hangs", "s3 fails",
         "s3 fails and kill", "s3 fails and hold"]
SEED = int(os.environ.get("CAMPAIGN_SEED", "17"))
ROUNDS = int(os.environ.get("CAMPAIGN_ROUNDS", "30"))


@pytest.fixture
def campaign(tmp_path):
    made = []

    def make(seed, s3=None):
        made.append(Campaign(tmp_path, seed, s3))
        return made[-1]

    yield make
    for c in made:
        c.close()


@pytest.mark.long
def test_what_is_committed_is_whole_and_stays(campaign):
    c = campaign(1)
    for kind in ("hold" if HAS_POINTS else "pause", "kill and etcd"):
        c.round(kind, 6)
    done = c.figures()
    assert done["takeovers"] > 0 and done["succeeded"] >= 0.8 * done["saves"], done


@pytest.mark.slow
@pytest.mark.seconds(20 + 20 * ROUNDS)
def test_a_campaign(campaign, s3_server):
    c = campaign(SEED, s3_server)
    for _ in range(ROUNDS):
        c.round(c.random.choice(KINDS), 24)
    c.check_all()
    done = c.figures()
    print("\n" + json.dumps(done))
    assert done["succeeded"] >= 0.8 * done["saves"], done
