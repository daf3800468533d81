"""The driver's report on its cards."""

import pytest

from runner.errors import MachineError
from runner.facts import FabricState
from runner.probes import smi

CARD = """
<gpu id="00000000:0{at}:00.0">
  <product_name>NVIDIA H100 80GB HBM3</product_name>
  <gpu_recovery_action>{recovery}</gpu_recovery_action>
  <mig_mode><current_mig>{mig}</current_mig></mig_mode>
  <uuid>GPU-{at}a</uuid>
  <pci><pci_gpu_link_info>
    <pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>5</current_link_gen></pcie_gen>
    <link_widths><max_link_width>16x</max_link_width><current_link_width>{width}x</current_link_width></link_widths>
  </pci_gpu_link_info></pci>
  <fabric><state>{fabric}</state><status>Success</status><health><summary>Healthy</summary></health></fabric>
  <clocks_event_reasons>
    <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
    <clocks_event_reason_hw_thermal_slowdown>{hot}</clocks_event_reason_hw_thermal_slowdown>
  </clocks_event_reasons>
  <fb_memory_usage><total>81559 MiB</total><used>{used} MiB</used></fb_memory_usage>
  <compute_mode>{mode}</compute_mode>
  <ecc_errors><volatile>
    <sram_correctable>7</sram_correctable><sram_uncorrectable>{bad}</sram_uncorrectable>
    <dram_correctable>N/A</dram_correctable><dram_uncorrectable>N/A</dram_uncorrectable>
  </volatile><aggregate><dram_uncorrectable>9</dram_uncorrectable></aggregate></ecc_errors>
  <remapped_rows><remapped_row_pending>{pending}</remapped_row_pending><remapped_row_failure>{failed}</remapped_row_failure></remapped_rows>
  <gpu_power_readings><current_power_limit>{power} W</current_power_limit><default_power_limit>700.00 W</default_power_limit></gpu_power_readings>
  <processes>{processes}</processes>
</gpu>
"""
WELL = {
    "mig": "Disabled",
    "width": 16,
    "fabric": "Completed",
    "hot": "Not Active",
    "used": 4,
    "mode": "Default",
    "bad": 0,
    "pending": "No",
    "failed": "No",
    "power": "700.00",
    "recovery": "None",
    "processes": "",
}


def document(*cards):
    body = "".join(CARD.format(**WELL | {"at": at} | card) for at, card in enumerate(cards))
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
    return f"{head}<nvidia_smi_log><driver_version>550.54.15</driver_version><cuda_version>12.4</cuda_version>{body}</nvidia_smi_log>"


def test_a_healthy_card_is_read():
    """
    Numbers without their units, words as ours.
    """
    report = smi.parse_report(document({}, {}))

    assert ("550.54.15", "12.4", 2) == (report.driver, report.cuda, len(report.cards))
    card = report.cards[1]
    assert (1, "NVIDIA H100 80GB HBM3", "GPU-1a", 81559 << 20) == (card.index, card.name, card.uuid, card.memory_bytes)
    assert FabricState(state="Completed", status="Success", health="Healthy") == card.fabric
    assert (700.0, 700.0, 0, (), ()) == (
        card.power_limit_w,
        card.power_default_w,
        card.uncorrected,
        card.slowdowns,
        card.processes,
    )


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ({"bad": 3}, "uncorrected", 3),
        ({"pending": "Yes"}, "remap_pending", True),
        ({"failed": "Yes"}, "remap_failed", True),
        ({"recovery": "Reset"}, "recovery", "Reset"),
        ({"mig": "Enabled"}, "mig", True),
        ({"mode": "Prohibited"}, "compute_mode", "Prohibited"),
        ({"hot": "Active"}, "slowdowns", ("too hot",)),
        ({"power": "350.00"}, "power_limit_w", 350.0),
        ({"used": 2048}, "used_bytes", 2 << 30),
        (
            {
                "processes": "<process_info><pid>7</pid><process_name>python</process_name><used_memory>9 MiB</used_memory></process_info>"
            },
            "processes",
            ("python (pid 7, 9 MiB)",),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_odd_is_read(words, field, value):
    """
    Each oddity has its field.
    """
    (card,) = smi.parse_report(document(words)).cards

    assert value == getattr(card, field)


def test_older_drivers_are_read():
    """
    Throttle reasons and power readings had other names; what is missing is unknown, never an error.
    """
    old = """<nvidia_smi_log><gpu id="0"><product_name>Tesla V100-SXM2-16GB</product_name>
    <clocks_throttle_reasons><clocks_throttle_reason_hw_power_brake_slowdown>Active</clocks_throttle_reason_hw_power_brake_slowdown></clocks_throttle_reasons>
    <power_readings><enforced_power_limit>150.00 W</enforced_power_limit><default_power_limit>300.00 W</default_power_limit></power_readings>
    <ecc_errors><volatile><double_bit><total>2</total></double_bit></volatile></ecc_errors></gpu></nvidia_smi_log>"""

    (card,) = smi.parse_report(old).cards

    assert (("power brake",), 150.0, 300.0, None) == (
        card.slowdowns,
        card.power_limit_w,
        card.power_default_w,
        card.fabric,
    )


@pytest.mark.parametrize("text", ["", "No devices were found", document({})[:-40], "\x00\xff"], ids=repr)
def test_what_is_no_report_is_the_machines_fault(text):
    """
    One line, no traceback.
    """
    with pytest.raises(MachineError, match="expected XML"):
        smi.parse_report(text)


def test_xids_are_found_in_the_kernels_log(tmp_path):
    """
    Each card and number once.
    """
    log = tmp_path / "dmesg"
    log.write_text(
        "#!/bin/sh\necho '[1.0] NVRM: Xid (PCI:0000:91:00): 79, pid=1, GPU has fallen off the bus.'\n"
        "echo '[1.1] NVRM: Xid (PCI:0000:91:00): 79, pid=1, again'\necho '[2.0] NVRM: Xid (0000:9b:00): 31, x'\n"
    )
    log.chmod(0o755)

    assert (("0000:91:00", 79), ("0000:9b:00", 31)) == smi.read_xids(str(log))
