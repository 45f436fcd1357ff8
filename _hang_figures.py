"""Seconds from SIGSTOP of one of three members until the last other had its error, with and without a bound."""
import os, signal, sys, time
from tests.parallel.members import Pool
from tridentserve.errors import GroupError
from tridentserve.parallel import StepPatience
import torch
def steps(member, name, bounded):
    group = member.group(name, 60.0)
    n = 0
    from contextlib import nullcontext
    try:
        with (StepPatience(group, 15.0, None) if bounded else nullcontext()) as patience:
            while True:
                group.agree(); n += 1
                if patience is not None: patience.note_boundary()
                block = torch.zeros(1 << 10)
                group.all_to_all([block]*group.size, [tuple(block.shape)]*group.size)
                time.sleep(0.05)
                if n == 5: member.store.set(f"{name}{member.rank}", "")
    except GroupError as e:
        return time.monotonic(), str(e)[-120:]
if __name__ == "__main__":
    import tests.parallel.members as m
    m.PATIENCE_S = 100.0
    pool = Pool(3)
    for bounded in (True, False):
        for hanging in (0, 2):
            name = f"{bounded}{hanging}"
            pool.post(steps, 3, name, bounded)
            pool.store.wait([f"{name}{r}" for r in range(3)])
            at = time.monotonic(); os.kill(pool._members[hanging][0].pid, signal.SIGSTOP)
            res = pool.results([r for r in range(3) if r != hanging])
            print(bounded, hanging, round(max(t for t, _ in res) - at, 1), [e for _, e in res], flush=True)
            pool.kill(hanging); pool.replace(hanging)
    pool.close()
