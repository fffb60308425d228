"""Every wrong configuration gets lines that say where, which key, what value, and the way out. A table of them."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tokenflow.config import Flag, load
from tokenflow.errors import ConfigError

MODEL = '\n[models.m]\nengine = "echo"\n'
HASH = "a" * 64

# (text, the line it is reported for, the rest of the message); MODEL is added, so that nothing else is wrong.
WRONG = {
    "integer from text": (
        '[server]\nport = "eighty"',
        'conf/x.toml:2: server.port: expected an integer, got "eighty"; write a number like 8000',
    ),
    "integer in quotes": (
        '[server]\nport = "8000"',
        'conf/x.toml:2: server.port: expected an integer, got "8000"; write 8000 without quotes',
    ),
    "integer from true": (
        "server.port = true",
        "conf/x.toml:1: server.port: expected an integer, got true; write a number like 8000",
    ),
    "integer from float": (
        "[limits]\nmax_tokens = 1.0",
        "conf/x.toml:2: limits.max_tokens: expected an integer, got 1.0; write a number from 1 on "
        "(Cap on generated tokens per choice; unset: the rest of the context)",
    ),
    "number in quotes": (
        '[server]\ndrain_s = "2.5"',
        'conf/x.toml:2: server.drain_s: expected a number, got "2.5"; write 2.5 without quotes',
    ),
    "number from true": (
        "[server]\n\ndrain_s = true",
        "conf/x.toml:3: server.drain_s: expected a number, got true; write a number like 20.0",
    ),
    "certificate without key": (
        '[server]\ntls_certificate = "a.pem"',
        'conf/x.toml:2: server.tls_certificate: "a.pem" is of no use alone; add tls_key',
    ),
    "key without certificate": (
        '[server]\ntls_key = "a.pem"',
        'conf/x.toml:2: server.tls_key: "a.pem" is of no use alone; add tls_certificate',
    ),
    "infinite": (
        "[stream]\nstall_s = inf",
        "conf/x.toml:2: stream.stall_s: expected a finite number, got inf; write a number like 30.0",
    ),
    "not a number": (
        "[stream]\nstall_s = nan",
        "conf/x.toml:2: stream.stall_s: expected a finite number, got nan; write a number like 30.0",
    ),
    "boolean from number": (
        "[server]\ndebug = 1",
        "conf/x.toml:2: server.debug: expected true or false, got 1; write true or false, without quotes",
    ),
    "text from number": (
        "[server]\nhost = 127",
        'conf/x.toml:2: server.host: expected a string, got 127; write it in quotes: "127"',
    ),
    "text from date": (
        "[server]\nhost = 1979-05-27",
        'conf/x.toml:2: server.host: expected no date, got 1979-05-27; write it in quotes: "1979-05-27"',
    ),
    "text from list": (
        "[server]\nhost = [1]",
        'conf/x.toml:2: server.host: expected a string, got [1]; write one in quotes: "text"',
    ),
    "below the bound": (
        "[server]\nport = -1",
        "conf/x.toml:2: server.port: expected at least 0, got -1; write a number from 0 to 65535, like 8000",
    ),
    "above the bound": (
        "[server]\nport = 65536",
        "conf/x.toml:2: server.port: expected at most 65535, got 65536; write a number from 0 to 65535, like 8000",
    ),
    "not above the bound": (
        "[server]\nbody_timeout_s = 0",
        "conf/x.toml:2: server.body_timeout_s: expected a number above 0, got 0; write a number above 0, like 30.0",
    ),
    "list from text": (
        '[plugins]\nfiles = "a.py"',
        'conf/x.toml:2: plugins.files: expected a list, got "a.py"; write it in brackets: ["a.py"]',
    ),
    "list from table": (
        "[plugins.files]\na = 1",
        'conf/x.toml:1: plugins.files: expected a list, got a table; write one in brackets: ["…"]',
    ),
    "list from a row's table": (
        f'[auth.keys]\nname = "a"\nsha256 = "{HASH}"',
        "conf/x.toml:1: auth.keys: expected a list, got a table; write [[auth.keys]] above each of its tables",
    ),
    "list of tables from text": (
        '[auth]\nkeys = "a"',
        'conf/x.toml:2: auth.keys: expected a list, got "a"; write one in brackets: [{name = "…", sha256 = "…"}]',
    ),
    "no number below the least, and no default to show": (
        "[limits]\nmax_prompt_tokens = 0",
        "conf/x.toml:2: limits.max_prompt_tokens: expected at least 1, got 0; "
        "write a number from 1 on (Cap on prompt tokens; unset: the context)",
    ),
    "item of a list": (
        '[plugins]\nfiles = [\n  "a.py",\n  3,\n]',
        'conf/x.toml:4: plugins.files[1]: expected a string, got 3; write it in quotes: "3"',
    ),
    "table from number": (
        "server = 3",
        "conf/x.toml:1: server: expected a table, got 3; write `key = value` lines under its [header]",
    ),
    "unknown section": ("[servre]\nport = 1", "conf/x.toml:1: servre: unknown key; did you mean server?"),
    "unknown key": ("[server]\nprot = 1", "conf/x.toml:2: server.prot: unknown key; did you mean port?"),
    "unknown key, like none": (
        "[stream]\nxyzzy = 1",
        "conf/x.toml:2: stream.xyzzy: unknown key; there is coalesce_max_ms, coalesce_ms, "
        "heartbeat_s, park_hold_s, stall_s, window",
    ),
    "unknown key in a row": (
        f'[[auth.keys]]\nname = "a"\nsha256 = "{HASH}"\nnmae = "b"',
        "conf/x.toml:4: auth.keys[0].nmae: unknown key; did you mean name?",
    ),
    "missing in a row": ('[[auth.keys]]\nname = "a"', "conf/x.toml:1: auth.keys[0].sha256: missing; add `sha256 = …`"),
    "row is no table": (
        "[auth]\nkeys = [3]",
        'conf/x.toml:2: auth.keys[0]: expected a table, got 3; write one in braces: {name = "…", sha256 = "…"}',
    ),
    "hash is a key": (
        '[[auth.keys]]\nname = "a"\nsha256 = "hunter2"',
        "conf/x.toml:3: auth.keys[0].sha256: expected 64 hex digits, got 7 characters; "
        'make them with: printf %s "$KEY" | sha256sum',
    ),
    "hash as sha256sum prints it": (
        f'[[auth.keys]]\nname = "a"\nsha256 = "{HASH}  -"',
        "conf/x.toml:3: auth.keys[0].sha256: expected 64 hex digits, got 67 characters; "
        "leave out what sha256sum writes after them",
    ),
    "hash of nothing": (
        '[[auth.keys]]\nname = "a"\nsha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"',
        "conf/x.toml:3: auth.keys[0].sha256: it is the hash of an empty text, which is no key; set KEY before it is "
        "hashed: read -rs KEY",
    ),
    "host with a port": (
        '[http]\nhosts = ["models.example.org:443"]',
        'conf/x.toml:2: http.hosts[0]: expected a host\'s name, got "models.example.org:443"; '
        "write it without scheme, port and path: models.example.org",
    ),
    "origin with a path": (
        '[http]\ncors_origins = ["*", "https://chat.example.org/"]',
        'conf/x.toml:2: http.cors_origins[1]: expected an origin, got "https://chat.example.org/"; '
        "write it as browsers do, without a path: https://chat.example.org",
    ),
    "name with a dash": (
        '[server]\nname = "a-b"',
        'conf/x.toml:2: server.name: expected letters, digits and _ only, got "a-b"; write a text like "tf"',
    ),
    "empty name": (
        '[server]\nname = ""',
        'conf/x.toml:2: server.name: expected letters, digits and _ only, got ""; write a text like "tf"',
    ),
    "open without keys": (
        '[server]\nhost = "0.0.0.0"',
        'conf/x.toml:2: server.host: "0.0.0.0" can be reached from elsewhere and nobody needs a key; '
        "add [[auth.keys]] with name and sha256, or listen on 127.0.0.1",
    ),
    "open without keys, by name": (
        '[server]\nhost = "example"',
        'conf/x.toml:2: server.host: "example" can be reached from elsewhere and nobody needs a key; '
        "add [[auth.keys]] with name and sha256, or listen on 127.0.0.1",
    ),
    "two keys of one name": (
        f'[[auth.keys]]\nname = "a"\nsha256 = "{HASH}"\n[[auth.keys]]\nname = "a"\nsha256 = "{"b" * 64}"',
        'conf/x.toml:5: auth.keys[1].name: "a" is auth.keys[0]\'s already; give each its own',
    ),
    "two names of one key": (
        f'[[auth.keys]]\nname = "a"\nsha256 = "{HASH}"\n[[auth.keys]]\nname = "b"\nsha256 = "{HASH.upper()}"',
        "conf/x.toml:6: auth.keys[1].sha256: this key is auth.keys[0]'s already; give each its own",
    ),
    "default above its max": (
        "[timeouts]\nidle_timeout_s = 700",
        "conf/x.toml:2: timeouts.idle_timeout_s: 700.0 is above idle_timeout_max_s, 600.0; "
        "lower it, or raise idle_timeout_max_s",
    ),
    "max below the default": (
        "[stream]\ncoalesce_ms = 20\ncoalesce_max_ms = 10",
        "conf/x.toml:2: stream.coalesce_ms: 20 is above coalesce_max_ms, 10; lower it, or raise coalesce_max_ms",
    ),
    "broken plugin file": (
        '[plugins]\nfiles = ["a.py", "broken.py"]',
        "conf/x.toml:2: plugins.files[1]: plugin file conf/broken.py is broken",
    ),
    "sinks is no table": (
        "sinks = 3",
        "conf/x.toml:1: sinks: expected tables, got 3; write [sinks.<name>]",
    ),
    "sink is no table": (
        "[sinks]\necho = 3",
        "conf/x.toml:2: sinks.echo: expected a table, got 3; write [sinks.echo]",
    ),
    "unknown sink": ("[sinks.nope]", 'conf/x.toml:1: sinks.nope: no plugin offers "nope"'),
    "sink lacks a key": ("[sinks.needy]", "conf/x.toml:1: sinks.needy.path: missing; add `path = …`"),
}


@pytest.mark.parametrize(("text", "line"), WRONG.values(), ids=WRONG)
def test_wrong_configuration(problems_of, text: str, line: str) -> None:
    assert problems_of(text + MODEL) == [line]


# The same for the keys of one model, whose table begins on line 1.
WRONG_MODEL = {
    "no engine": ("", '1: models.m: engine is missing; add `engine = "…"`'),
    "engine is no text": (
        "engine = 3",
        "2: models.m.engine: expected a string, got 3; write the engine's name in quotes",
    ),
    "unknown engine": ('engine = "nope"', '2: models.m.engine: no plugin offers "nope"'),
    "lacks a key": ('engine = "needy"', "1: models.m.path: missing; add `path = …`"),
    "unknown key": ('engine = "echo"\ntime = 3', "3: models.m.time: unknown key; did you mean times?"),
    "not a number where there is a most": (
        'engine = "echo"\n[models.m.defaults]\ntemperature = nan',
        "4: models.m.defaults.temperature: expected a finite number, got nan; "
        "write a number from 0 to 10 (0 always takes the likeliest token)",
    ),
    "unknown table": (
        'engine = "echo"\n[models.m.default]\ntop_k = 3',
        "3: models.m.default: unknown key; did you mean defaults?",
    ),
    "bound": ('engine = "echo"\ntimes = 0', "3: models.m.times: expected at least 1, got 0; write a number from 1 on"),
    "choice": (
        'engine = "echo"\nmode = "soft"',
        '3: models.m.mode: expected one of "plain" or "loud", got "soft"; write a text like "plain"',
    ),
    "path": ('engine = "echo"\nfile = 3', '3: models.m.file: expected a string, got 3; write it in quotes: "3"'),
    "union": (
        'engine = "echo"\nsize = 1.5',
        '3: models.m.size: expected an integer or a string, got 1.5; write a text like "auto"',
    ),
    "made by the class itself": (
        'engine = "echo"\nboth = 3',
        "3: models.m.both: unknown key; there is api_key, chat, code, defaults, either, even, file, level, mode, pair, "
        "size, tags, times, voice, voices, weights, word",
    ),
    "free keys": (
        'engine = "echo"\nweights = {a = 1, b = "x"}',
        '3: models.m.weights.b: expected a number, got "x"; write a number like 1.5',
    ),
    "set": (
        'engine = "echo"\ntags = ["a", 1]',
        '3: models.m.tags[1]: expected a string, got 1; write it in quotes: "1"',
    ),
    "key of a row": (
        'engine = "echo"\n[[models.m.voices]]\nname = "a"\npich = 1',
        "5: models.m.voices[0].pich: unknown key; did you mean pitch?",
    ),
    "row lacks a key": ('engine = "echo"\n[[models.m.voices]]', "3: models.m.voices[0].name: missing; add `name = …`"),
    "optional table": (
        'engine = "echo"\n[models.m.voice]\nname = "a"\npitch = "x"',
        '5: models.m.voice.pitch: expected a number, got "x"; write a number like 1.0',
    ),
    "optional table's keys": (
        'engine = "echo"\nvoice = {name = "a", picth = 1}',
        "3: models.m.voice.picth: unknown key; did you mean pitch?",
    ),
    "a default beside the engine's keys": (
        'engine = "echo"\ntemperature = 0.7',
        "3: models.m.temperature: it belongs in [models.m.defaults]; write it there",
    ),
    "chat is no table": (
        'engine = "echo"\nchat = "think"',
        '3: models.m.chat: expected a table, got "think"; write `key = value` lines under its [header]',
    ),
    "chat's unknown key": (
        'engine = "echo"\n[models.m.chat]\ntools = "x"',
        "4: models.m.chat.tools: unknown key; did you mean tool_calls?",
    ),
    "chat's format": (
        'engine = "echo"\n[models.m.chat]\nreasoning = "deep"',
        '4: models.m.chat.reasoning: expected one of "auto", "none", "harmony", "mistral", "seed" or "think", '
        'got "deep"; write a text like "auto"',
    ),
    "two templates": (
        'engine = "echo"\n[models.m.chat]\ntemplate = "a"\ntemplate_file = "x.toml"',
        "3: models.m.chat: template and template_file are both set; take one",
    ),
    "no such template": (
        'engine = "echo"\n[models.m.chat]\ntemplate_file = "no.jinja"',
        "4: models.m.chat.template_file: there is no file conf/no.jinja; paths are relative to this file's folder",
    ),
    "a template's own name": (
        'engine = "echo"\n[models.m.chat]\ntemplate_kwargs = ["tools"]',
        "3: models.m.chat: template_kwargs has tools, which is the server's own to set; leave it out",
    ),
    "the class's own rule": ('engine = "echo"\ntimes = 13', "1: models.m: times = 13 brings bad luck; take 12"),
    "too few items": ('engine = "echo"\npair = [1]', "3: models.m.pair[1]: too few items; add what is missing"),
    "too many items": (
        'engine = "echo"\npair = [1, 2, 3]',
        "3: models.m.pair: expected at most 2 items, got [1, 2, 3]; write something like [1.0, 2.0]",
    ),
    "too few characters": (
        'engine = "echo"\nword = "x"',
        '3: models.m.word: expected at least 2 characters, got "x"; write a text like "word"',
    ),
    "a kind that we have no words for": (
        'engine = "echo"\neven = 3',
        "3: models.m.even: expected a multiple of 2, got 3; write a number like 2",
    ),
    "pattern": (
        'engine = "echo"\ncode = "y"',
        '3: models.m.code: expected a text that matches ^x, got "y"; change it',
    ),
    "secret": (
        'engine = "echo"\napi_key = 12345',
        '3: models.m.api_key: expected a string, got 5 characters; write one in quotes: "text"',
    ),
}


@pytest.mark.parametrize(("text", "line"), WRONG_MODEL.values(), ids=WRONG_MODEL)
def test_wrong_model(problems_of, text: str, line: str) -> None:
    assert problems_of(f"[models.m]\n{text}") == [f"conf/x.toml:{line}"]


def test_a_table_of_two_kinds_tells_what_each_would_need(problems_of) -> None:
    assert problems_of(MODEL + 'either = { volume = "x" }') == [
        "conf/x.toml:4: models.m.either.name: missing; add `name = …`",
        'conf/x.toml:4: models.m.either.volume: expected a number, got "x"; write a number like 0.5',
    ]


NO_MODELS = {
    "none": ("", 'conf/x.toml: models: there is none; add [models.<id>] with engine = "…"'),
    "empty table": ("[models]", 'conf/x.toml:1: models: there is none; add [models.<id>] with engine = "…"'),
    "no table": ("models = 1", "conf/x.toml:1: models: expected tables, got 1; write [models.<name>]"),
    "one is no table": ("[models]\nm = 1", "conf/x.toml:2: models.m: expected a table, got 1; write [models.m]"),
    "empty id": ('[models.""]\nengine = "echo"', 'conf/x.toml:1: models."": the name is empty; give it one'),
}


@pytest.mark.parametrize(("text", "line"), NO_MODELS.values(), ids=NO_MODELS)
def test_without_a_model(problems_of, text: str, line: str) -> None:
    assert problems_of(text) == [line]


NO_TOML = {
    "value without quotes": (
        "[server]\nport = eighty",
        'conf/x.toml:2: no valid TOML: invalid value at column 8; texts stand in quotes: key = "text"',
    ),
    "key twice": (
        "[server]\nport = 1\nport = 2",
        "conf/x.toml:3: no valid TOML: cannot overwrite a value at the end; keep one of the two",
    ),
    "a well": ("[server]\nport = " + "[" * 5000, "conf/x.toml: it is nested too deeply to be read; mend its brackets"),
    "a number without end": (
        "[server]\nport = " + "9" * 5000,
        "conf/x.toml: a number in it has thousands of digits; shorten it",
    ),
    "unfinished": (
        '[server]\nhost = """a\n',
        "conf/x.toml:2: no valid TOML: unterminated string at the end; "
        "a line is `key = value`, `[table]` or `# comment`",
    ),
    "not UTF-8": (b"[server]\n# caf\xe9", "conf/x.toml:2: byte 0xe9 is not UTF-8; save it as UTF-8"),
}


@pytest.mark.parametrize(("text", "line"), NO_TOML.values(), ids=NO_TOML)
def test_no_toml(problems_of, text: str | bytes, line: str) -> None:
    assert problems_of(text) == [line]


def test_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, catalogue) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load("conf/y.toml", {}, {}, catalogue)
    assert caught.value.problems == [
        "conf/y.toml: no such file; write one with `tokenflow config template > conf/y.toml`"
    ]


def test_a_folder_is_no_file(tmp_path: Path, catalogue) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {}, {}, catalogue)
    assert caught.value.problems == [f"{tmp_path}: cannot be read: Is a directory; name a readable file with -c"]


def test_files_of_models_are_looked_for_where_that_is_asked(load_text, problems_of) -> None:
    text = '[models.a]\nengine = "echo"\nfile = "a.bin"\n[models.b]\nengine = "echo"\ntimes = 404\n[models.c]\n'
    text += 'engine = "echo"\nfile = "c.bin"\ntime = 1\n[models.d]\nengine = "echo"\n'
    assert problems_of(text, look=True, models__d__file="d.bin") == [
        "conf/x.toml:3: models.a.file: there is no file a.bin; name another",
        "conf/x.toml:5: models.b.engine: the plugin failed to look",
        "conf/x.toml:9: models.c.file: there is no file c.bin; name another",
        "conf/x.toml:10: models.c.time: unknown key; did you mean times?",
        "--set models.d.file: models.d.file: there is no file d.bin; name another",
    ]
    assert load_text(text.replace("time = 1\n", "")).config.models.keys() == {"a", "b", "c", "d"}


def test_files_of_sinks_are_looked_for_likewise(load_text, problems_of) -> None:
    text = MODEL + '[sinks.echo]\ntimes = 0\nfile = "a.bin"\n'
    assert problems_of(text, look=True) == [
        "conf/x.toml:5: sinks.echo.times: expected at least 1, got 0; write a number from 1 on",
        "conf/x.toml:6: sinks.echo.file: there is no file a.bin; name another",
    ]
    text = text.replace("times = 0", "times = 404")
    assert problems_of(text, look=True) == ["conf/x.toml:4: sinks.echo: the plugin failed to look"]
    assert load_text(text).config.sinks.keys() == {"echo"}


def test_the_files_of_tls_are_looked_for_where_that_is_asked(
    load_text, problems_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '[models.a]\nengine = "echo"\n[server]\ntls_certificate = "cert.pem"\ntls_key = "conf"\n'
    here = Path.cwd()
    assert problems_of(text, look=True) == [
        f"conf/x.toml:4: server.tls_certificate: there is no file {here}/cert.pem; "
        "paths are relative to the working directory",
        f"conf/x.toml:5: server.tls_key: there is no file {here}/conf; paths are relative to the working directory",
    ]
    assert load_text(text).config.server.tls_key == "conf"
    (here / "cert.pem").touch()
    text = text.replace('"conf"', '"cert.pem"')
    monkeypatch.setattr("os.access", lambda path, mode: False)  # whoever runs the tests may be root
    [line, _] = problems_of(text, look=True)
    assert line.endswith(f"tls_certificate: {here}/cert.pem is not readable by this user; mend its permissions")
    assert problems_of(text.replace("[server]", "[server]\nport = true"), look=True)[0].startswith("conf/x.toml:4: ")


def test_the_files_of_tls_are_read_as_they_will_be(load_text, problems_of) -> None:
    mine, other = (trustme.CA().issue_cert("localhost") for _ in range(2))
    here = Path.cwd()
    mine.cert_chain_pems[0].write_to_path("cert.pem")
    mine.private_key_pem.write_to_path("key.pem")
    other.private_key_pem.write_to_path("other.pem")
    mine.private_key_and_cert_chain_pem.write_to_path("both.pem")
    Path("none.pem").write_text("none")
    key = load_pem_private_key(mine.private_key_pem.bytes(), None)
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    Path("encrypted.pem").write_bytes(encrypted)

    def text(certificate: str, key: str) -> str:
        return MODEL + f'[server]\ntls_certificate = "{certificate}"\ntls_key = "{key}"\n'

    assert load_text(text("cert.pem", "key.pem"), look=True)
    assert load_text(text("both.pem", "both.pem"), look=True)
    for certificate, key, problem in (
        ("none.pem", "none.pem", f"5: server.tls_certificate: there is no certificate in {here}/none.pem; name a PEM "),
        ("key.pem", "cert.pem", f"5: server.tls_certificate: there is no certificate in {here}/key.pem; name a PEM "),
        ("cert.pem", "none.pem", f"6: server.tls_key: there is no private key in {here}/none.pem, or none that can be"),
        ("cert.pem", "other.pem", f"6: server.tls_key: {here}/other.pem is another certificate's; name the one that "),
        (
            "cert.pem",
            "encrypted.pem",
            f"6: server.tls_key: {here}/encrypted.pem is encrypted, and a server has nobody ",
        ),
    ):
        [line] = problems_of(text(certificate, key), look=True)
        assert line.startswith(f"conf/x.toml:{problem}")


def test_a_certificate_that_is_too_weak(problems_of, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ssl.SSLError("no")
    error.reason = "EE_KEY_TOO_SMALL"

    def refuse(*args: object) -> None:
        raise error

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", refuse)
    trustme.CA().cert_pem.write_to_path("cert.pem")
    [line] = problems_of(MODEL + '[server]\ntls_certificate = "cert.pem"\ntls_key = "cert.pem"\n', look=True)
    assert line == (
        f"conf/x.toml:5: server.tls_certificate: {Path.cwd()}/cert.pem with this key is refused (ee key too small); "
        "have another made"
    )


def test_what_is_wrong_with_one_key_hides_nothing_of_another(problems_of) -> None:
    """Each line once had to wait until those of another kind were mended."""
    text = """\
[server]
port = "x"
tls_certificate = "cert.pem"
[timeouts]
idle_timeout_s = 700
total_timeout_s = true
[plugins]
files = [3, "broken.py"]
[models.a]
engine = "echo"
file = "a.bin"
times = 0
[models.a.chat]
template_file = "no.jinja"
tool_calls = "x"
[models.b]
engine = "nope"
chat.template = "{% if"
[models.c]
chat.template = "{% for"
[models.d]
engine = "echo"
times = 13
mode = "soft"
[models.e]
engine = "echo"
chat = { template = "a", template_file = "b", reasoning = "deep" }
"""
    lines = problems_of(text, look=True, template_fault=lambda given: f"{given} is none")
    assert [line.removeprefix("conf/x.toml:").partition("; ")[0] for line in lines] == [
        '2: server.port: expected an integer, got "x"',
        '3: server.tls_certificate: "cert.pem" is of no use alone',
        f"3: server.tls_certificate: there is no file {Path.cwd()}/cert.pem",
        "5: timeouts.idle_timeout_s: 700.0 is above idle_timeout_max_s, 600.0",
        "6: timeouts.total_timeout_s: expected a number, got true",
        "8: plugins.files[0]: expected a string, got 3",
        "8: plugins.files[1]: plugin file conf/broken.py is broken",
        "11: models.a.file: there is no file a.bin",
        "12: models.a.times: expected at least 1, got 0",
        "14: models.a.chat.template_file: there is no file conf/no.jinja",
        '15: models.a.chat.tool_calls: expected one of "auto", "none", "deepseek", "glm", "harmony", "hermes", '
        '"llama3", "mistral", "pythonic" or "qwen_xml", got "x"',
        '17: models.b.engine: no plugin offers "nope"',
        "18: models.b.chat.template: {% if is none",
        "19: models.c: engine is missing",
        "20: models.c.chat.template: {% for is none",
        "21: models.d: times = 13 brings bad luck",
        '24: models.d.mode: expected one of "plain" or "loud", got "soft"',
        '27: models.e.chat.reasoning: expected one of "auto", "none", "harmony", "mistral", "seed" or "think", '
        'got "deep"',
        "27: models.e.chat: template and template_file are both set",
        "27: models.e.chat.template: a is none",
        "27: models.e.chat.template_file: there is no file conf/b",
    ]


def test_what_a_class_says_of_its_keys_hides_nothing(problems_of) -> None:
    text = '[models.a]\nengine = "echo"\nfile = "a.bin"\ntimes = 13\nmode = "soft"\n[models.a.chat]\ntemplate = "a"\n'
    lines = problems_of(
        text + 'template_file = "no.jinja"\n', look=True, template_fault=lambda given: f"{given} is none"
    )
    assert [line.removeprefix("conf/x.toml:").partition("; ")[0] for line in lines] == [
        "1: models.a: times = 13 brings bad luck",
        "3: models.a.file: there is no file a.bin",
        '5: models.a.mode: expected one of "plain" or "loud", got "soft"',
        "6: models.a.chat: template and template_file are both set",
        "7: models.a.chat.template: a is none",
        "8: models.a.chat.template_file: there is no file conf/no.jinja",
    ]


def test_a_plugin_that_fails_to_look_at_a_wrong_table_is_not_blamed(problems_of) -> None:
    text = '[models.a]\nengine = "echo"\ntimes = 404\nmode = "soft"\n'
    assert [line.partition(": expected")[0] for line in problems_of(text, look=True)] == [
        "conf/x.toml:4: models.a.mode"
    ]


UNSAID = {
    "a certificate's key is wrong": '[server]\ntls_certificate = "a.pem"\ntls_key = 3',
    "the list of keys is wrong": '[server]\nhost = "0.0.0.0"\n[[auth.keys]]\nname = "a"\nsha256 = "hunter2"',
    "the most is wrong": "[timeouts]\nidle_timeout_s = 700\nidle_timeout_max_s = true",
    "a model's file is wrong": '[models.a]\nengine = "echo"\nfile = 3',
    "a required key is wrong": '[models.a]\nengine = "needy"\npath = 3',
}


@pytest.mark.parametrize("text", UNSAID.values(), ids=UNSAID)
def test_nothing_is_said_of_the_default_in_a_wrong_keys_place(problems_of, text: str) -> None:
    assert len(problems_of(text + MODEL)) == 1


def test_all_problems_at_once_in_the_order_of_the_file(problems_of) -> None:
    text = '[models.a]\nengine = "nope"\n[server]\nport = "x"\nhost = 1979-05-27\nhots = 1\n'
    text += "[limits]\nmax_n = 0\n[sinks.nope]"
    env = {"TOKENFLOW_SERVER__DEBUG": "perhaps"}
    assert [line.partition(": ")[0] for line in problems_of(text, env, stream__window=Flag("--window", 0))] == [
        "conf/x.toml:2",
        "conf/x.toml:4",
        "conf/x.toml:5",
        "conf/x.toml:6",
        "conf/x.toml:8",
        "conf/x.toml:9",
        "environment TOKENFLOW_SERVER__DEBUG",
        "--window",
    ]


OUTSIDE = {
    "variable": (
        {"TOKENFLOW_SERVER__PORT": "eighty"},
        {},
        'environment TOKENFLOW_SERVER__PORT: server.port: expected an integer, got "eighty"; write a number like 8000',
    ),
    "unknown variable": (
        {"TOKENFLOW_SERVER__PROT": "1"},
        {},
        "environment TOKENFLOW_SERVER__PROT: server.prot: unknown key; did you mean port?",
    ),
    "unknown section": (
        {"TOKENFLOW_SERVR__PORT": "1"},
        {},
        "environment TOKENFLOW_SERVR__PORT: servr: unknown key; did you mean server?",
    ),
    "variable below a value": (
        {"TOKENFLOW_SERVER__PORT__X": "1", "TOKENFLOW_SERVER__PORT": "1"},
        {},
        "environment TOKENFLOW_SERVER__PORT__X: server.port.x: server.port is no table; give it as a whole: "
        "TOKENFLOW_SERVER__PORT='…'",
    ),
    "not UTF-8": (
        {"TOKENFLOW_SERVER__NAME": "caf\udce9"},
        {},
        "environment TOKENFLOW_SERVER__NAME: server.name: the value is not UTF-8; set it as UTF-8",
    ),
    "--set": (
        {},
        {"server.port": "eighty"},
        '--set server.port: server.port: expected an integer, got "eighty"; write a number like 8000',
    ),
    "flag": (
        {},
        {"server.port": Flag("--port", 70000)},
        "--port: server.port: expected at most 65535, got 70000; write a number from 0 to 65535, like 8000",
    ),
    "list of tables in neither language": (
        {"TOKENFLOW_AUTH__KEYS": '[{name: "x"}]'},
        {},
        'environment TOKENFLOW_AUTH__KEYS: auth.keys: expected a list, got "[{name: \\"x\\"}]"; it is neither TOML nor '
        """JSON; write it as a whole, as TOML or JSON: TOKENFLOW_AUTH__KEYS='[{name = "…", sha256 = "…"}]'""",
    ),
    "list by index": (
        {"TOKENFLOW_AUTH__KEYS__0__NAME": "x"},
        {},
        "environment TOKENFLOW_AUTH__KEYS__0__NAME: auth.keys: expected a list, got a table; "
        """write it as a whole, as TOML or JSON: TOKENFLOW_AUTH__KEYS='[{name = "…", sha256 = "…"}]'""",
    ),
    "list from text": (
        {"TOKENFLOW_PLUGINS__FILES": "a.py"},
        {},
        'environment TOKENFLOW_PLUGINS__FILES: plugins.files: expected a list, got "a.py"; '
        'write it in brackets: ["a.py"]',
    ),
    "list by --set": (
        {},
        {"auth.keys": "x"},
        '--set auth.keys: auth.keys: expected a list, got "x"; write it as a whole, as TOML or JSON: '
        """--set 'auth.keys=[{name = "…", sha256 = "…"}]'""",
    ),
    "a row of JSON": (
        {"TOKENFLOW_AUTH__KEYS": '[{"name": "x"}, null]'},
        {},
        "environment TOKENFLOW_AUTH__KEYS: auth.keys[0].sha256: missing; add `sha256 = …`",
        "environment TOKENFLOW_AUTH__KEYS: auth.keys[1]: expected a table, got null; "
        'write one in braces: {name = "…", sha256 = "…"}',
    ),
    "section from number": (
        {},
        {"stream": "3"},
        "--set stream: stream: expected a table, got 3; write it as a whole, as TOML or JSON: "
        "--set 'stream={window = 1}'",
    ),
    "free keys from text": (
        {"TOKENFLOW_MODELS__M__WEIGHTS": "x"},
        {},
        'environment TOKENFLOW_MODELS__M__WEIGHTS: models.m.weights: expected a table, got "x"; '
        "write it as a whole, as TOML or JSON: TOKENFLOW_MODELS__M__WEIGHTS='{key = 1.0}'",
    ),
    "sink from text": (
        {"TOKENFLOW_SINKS__ECHO": "x"},
        {},
        'environment TOKENFLOW_SINKS__ECHO: sinks.echo: expected a table, got "x"; '
        "write it as a whole, as TOML or JSON: TOKENFLOW_SINKS__ECHO='{key = …}'",
    ),
    "sinks from text": (
        {},
        {"sinks": "x"},
        '--set sinks: sinks: expected tables, got "x"; write it as a whole, as TOML or JSON: '
        "--set 'sinks={name = {key = …}}'",
    ),
    "no key": ({}, {"server port": 1}, "--set server port: 'server port' is no key; write it like server.port"),
    "two keys": ({}, {"a = 1\nb": 1}, "--set a = 1\nb: 'a = 1\\nb' is no key; write it like server.port"),
}


@pytest.mark.parametrize("case", OUTSIDE.values(), ids=OUTSIDE)
def test_wrong_outside_the_file(problems_of, case: tuple[Any, ...]) -> None:
    env, overrides, *lines = case
    assert problems_of(MODEL, env, **overrides) == lines


def test_a_variable_below_a_list_of_the_file(problems_of) -> None:
    text = f'[[auth.keys]]\nname = "a"\nsha256 = "{HASH}"\n'
    assert problems_of(text + MODEL, {"TOKENFLOW_AUTH__KEYS__0__NAME": "b"}) == [
        "environment TOKENFLOW_AUTH__KEYS__0__NAME: auth.keys.0.name: auth.keys is no table; give it as a whole: "
        "TOKENFLOW_AUTH__KEYS='[…]'"
    ]


@dataclass
class OddAttribute:
    what: "object.nothing" = None  # noqa: UP037  # it must not be evaluated here


@dataclass
class OddName:
    what: "Nothing" = None  # noqa: F821, UP037  # it does not exist, that is the point


@dataclass
class OddType:
    what: socket = None


@pytest.mark.parametrize("cls", [OddAttribute, OddName, OddType])
def test_a_class_that_cannot_be_used(problems_of, catalogue, cls: type) -> None:
    catalogue.classes = {"odd": cls}
    [line] = problems_of('[models.m]\nengine = "odd"')
    assert line.startswith("conf/x.toml:2: models.m.engine: the configuration class ")
    assert f"{cls.__name__} cannot be used: " in line
