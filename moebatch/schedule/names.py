"""All schedules by name."""

from collections.abc import Callable, Mapping

from moebatch.schedule.cgopipe import cgopipe, fastdecode
from moebatch.schedule.flexgen import flexgen, flexgen_c
from moebatch.schedule.klotski import hot, klotski, multi, simple
from moebatch.schedule.pregated import ondemand, prefetch_all, pregated
from moebatch.schedule.promoe import promoe, promoe_base, promoe_preempt, promoe_prefetch
from moebatch.schedule.request import Schedule
from moebatch.schedule.setup import Setup

SCHEDULES: Mapping[str, Callable[[Setup], Schedule]] = {
    "klotski": klotski,
    "hot": hot,
    "multi": multi,
    "simple": simple,
    "cgopipe": cgopipe,
    "fastdecode": fastdecode,
    "flexgen": flexgen,
    "flexgen_c": flexgen_c,
    "pregated": pregated,
    "ondemand": ondemand,
    "prefetch_all": prefetch_all,
    "promoe": promoe,
    "promoe_preempt": promoe_preempt,
    "promoe_prefetch": promoe_prefetch,
    "promoe_base": promoe_base,
}
