"""Seeded faults in what is done when memory is short."""

# ruff: noqa: E501 - a fault is one line
# fmt: off
from __future__ import annotations

from .fault import group

__all__ = ["PRESSURE_FAULTS"]

GIVE_BACK = group(
    "hostcache/region.py",
    "hostcache/test_give_back.py",
    ("parts of huge pages go", "return HUGE_PAGE if self.huge_pages else mmap.PAGESIZE", "return mmap.PAGESIZE"),
    ("a memfd's pages leave the mapping and stay in memory", "mmap.MADV_DONTNEED if self.fd is None else mmap.MADV_REMOVE", "mmap.MADV_DONTNEED"),
    ("what a device uses goes", "return self._gives_back and not self._users and", "return self._gives_back and"),
    ("locked pages count as gone", "            self._gives_back = False\n        return", "            pass\n        return"),
    ("a heap's pages go", 'self._gives_back = kind != "dma heap"', "self._gives_back = True"),
    ("pages come back over what lies beside them", "self.buffer[offset : offset + nbytes : mmap.PAGESIZE] |= 0", "self.buffer[offset : offset + nbytes : mmap.PAGESIZE] = 0"),
)

WITHHELD = [
    *group(
        "hostcache/blocks.py",
        "hostcache/test_blocks.py",
        ("withheld blocks count as used", " - self.fenced - self.withheld", " - self.fenced"),
        ("what hangs on an evicted block stays", "while self.is_cached(block):", "if self.is_cached(block):"),
    ),
    *group(
        "hostcache/extents.py",
        "hostcache/test_blocks.py",
        ("withheld blocks are handed out", "        self.free[:] = left  # the pools know this very list\n", ""),
        ("the pools go on with another list of what is free", "self.free[:] = left", "self.free = left"),
        ("what is in use is withheld", "if len(left) + len(chosen) != len(self.free):", "if False:"),
        ("what was never withheld is restored", "if not chosen <= self.withheld:", "if False:"),
        ("restored blocks are lost", "        for extent in chosen:\n            heapq.heappush(self.free, extent)\n", ""),
    ),
    *group(
        "hostcache/balloon.py",
        "hostcache/test_balloon.py",
        ("blocks in use lose their bytes", "all(extent in age for extent in extents)", "True"),
        ("a block is free before all of it is there", "self._given.isdisjoint((first // self._granule_bytes, last // self._granule_bytes))", "first // self._granule_bytes not in self._given"),
        ("blocks are free before their pages are there", "            try:\n                self._region.populate(granule * self._granule_bytes, self._granule_bytes)\n", "            try:\n                pass\n"),
        ("the newest cached blocks go first", "max(age[extent] for extent in extents)", "-max(age[extent] for extent in extents)"),
        ("what should be spared goes", "if self.extents.common - lost < spare or not", "if not"),
        ("the cache is emptied for a region that keeps its pages", "        if not self._region.gives_back:\n            return False\n", ""),
    ),
]

LADDER = [
    *group(
        "hostcache/pressure.py",
        "hostcache/test_pressure.py",
        ("a level is climbed before the last one could show", "now - self._climbed >= self.limits.settle_seconds", "True"),
        ("there is always time to wait", "return urgent or now", "return now"),
        ("all levels are left at once", "            self._descends += self.limits.calm_seconds\n", ""),
        ("calm counts from the first sign of pressure", "            self._descends = now + self.limits.calm_seconds\n            if self.level is PressureLevel.CALM or", "            if self.level is PressureLevel.CALM:\n                self._descends = now + self.limits.calm_seconds\n            if self.level is PressureLevel.CALM or"),
        ("memory is taken until it is short again", "max(0, reading.headroom - self.limits.high_bytes)", "max(0, reading.headroom - self.limits.low_bytes)"),
        ("memory is taken before it is calm", "if self.level is not PressureLevel.CALM:\n            return 0", "if False:\n            return 0"),
        ("stalls are no reason", "        return reading.stalled\n", '        return ""\n'),
    ),
    *group(
        "hostcache/pressure_watch.py",
        "hostcache/test_pressure_watch.py",
        ("a trigger has no end", 'b"some 150000 1000000\\0"', 'b"some 150000 1000000"'),
        ("without a right nothing is heard", ', b"some 300000 2000000\\0")', ",)"),
        ("somebody else's full cgroup is the machine's", "if whose == _MACHINE and any(", "if False and any("),
        ("the machine's stalls are the root's, too", 'if (folder / "cgroup.type").exists():', "if True:"),
        ("a cgroup that is gone speaks for ever", "if event & select.POLLERR:", "if False:"),
        ("deaths of long ago count", "        self._deaths = self._count_deaths()\n", ""),
        ("a met limit is a death", 'row[0] in ("oom", "oom_kill")', 'row[0] in ("oom", "oom_kill", "max")'),
        ("a stall waits for the next look", "if not spoken and now < self._next_look:", "if now < self._next_look:"),
        ("descriptors are left open", "[self._events])):\n            os.close(descriptor)\n", "[self._events])):\n            pass\n"),
        ("what is said during a wait is lost", "        self._pending |= said  #", "        #"),
        ("a wait listens to others for ever", "                    self._poll.unregister(descriptor)\n", "                    pass\n"),
        ("what others have to say is taken for a stall", "others = [said.pop(descriptor) for", "others = [said[descriptor] for"),
    ),
    *group(
        "hostcache/pressure_response.py",
        "hostcache/test_pressure_response.py",
        ("nobody is shed", "level >= PressureLevel.SHED and", "False and"),
        ("shedding comes before the pause", "level >= PressureLevel.SHED and", "level >= PressureLevel.GIVE_BACK and"),
        ("admission stays paused", "            self._scheduler.resume_admission()\n", "            pass\n"),
        ("new requests are refused too early", "if self.ladder.level is PressureLevel.REFUSE:", "if self.ladder.level >= PressureLevel.SHED:"),
        ("memory is never taken again", "elif self._balloon.given_bytes:", "elif False:"),
        ("nothing is left to go on in", "self._balloon.inflate(self.ladder.wanted(reading), self._spare())", "self._balloon.inflate(self.ladder.wanted(reading))"),
        ("who waits for memory fails at once", "        if not hopeless:\n            self", "        if False:\n            self"),
        ("who waits for memory waits for ever", "hopeless = self.ladder.short and now - self._held_out_since >= PATIENCE_SECONDS", "hopeless = False"),
        ("who does not step is refused for ever", "        self.tend()\n        if", "        if"),
        ("a step that waits for memory spins", "            self.watch.wait(WAIT_SECONDS)\n", ""),
    ),
    *group(
        "npu/stepper.py",
        "npu/test_memory_pressure.py",
        ("an engine does not look at memory", "            self._pressure.tend()\n", "            pass\n"),
        ("an engine whose steps do nothing is not told", "            self._pressure.after_schedule(plan.rows)\n", "            pass\n"),
    ),
    *group(
        "npu/memory_pressure.py",
        "npu/test_memory_pressure.py",
        ("who waits does not look at memory", "        tend()\n", ""),
        ("who waits sleeps though there is work", "if idle() else 0.0", "if True else 0.0"),
        ("a wait of nobody knows how long begins", "if not seconds >= 0:", "if seconds < 0:"),
        ("a wait ends with the first look", "        if not left:\n", "        if True:\n"),
        ("who is not watched waits for nobody", "        poll.register(descriptor, select.POLLIN)\n", "        pass\n"),
    ),
    *group(
        "npu/engine.py",
        "npu/test_memory_pressure.py",
        ("a timer tends nothing", "                self.pressure.tend()\n", "                pass\n"),
    ),
    *group(
        "npu/model_memory.py",
        "npu/test_model_memory.py",
        ("a chosen pool takes what must stay free", "    plan = replace(plan, reserve_bytes=plan.reserve_bytes + to_stay_free)\n", ""),
        ("swapped KV takes no memory", "reserve_bytes=demand.swap_bytes", "reserve_bytes=0"),
        ("weights on the NPU count as on the CPU", "return plan if demand.weights_bytes is None else", "return plan if True else"),
        ("a pool for nobody is chosen", "if plan.pool_limit_bytes < least:", "if False:"),
    ),
]

PRESSURE_FAULTS = [*GIVE_BACK, *WITHHELD, *LADDER]
