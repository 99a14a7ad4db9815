"""POST /start_profile and /stop_profile, over a fake engine."""

import httpx2
from server_process import fake_server


def post(server, path, **headers):
    return httpx2.post(f"{server.url}{path}", headers=headers)


def test_a_profile_is_recorded_in_the_operators_folder(tmp_path):
    with fake_server(profiler_dir=str(tmp_path)) as server:
        assert post(server, "/start_profile").json() == {"folder": str(tmp_path)}
        assert server.engine.profile_folder == str(tmp_path)
        answer = post(server, "/stop_profile").json()
        assert answer == {"folder": f"{tmp_path}/plugins/profile/1", "summary": {"steps": 3}}


def test_out_of_turn_it_is_a_conflict(tmp_path):
    with fake_server(profiler_dir=str(tmp_path)) as server:
        stopped = post(server, "/stop_profile")
        assert stopped.status_code == 409 and "no profile" in stopped.json()["error"]["message"]
        post(server, "/start_profile")
        started = post(server, "/start_profile")
        assert started.status_code == 409 and "already" in started.json()["error"]["message"]


def test_without_a_folder_it_is_off():
    with fake_server() as server:
        for path in ("/start_profile", "/stop_profile"):
            refused = post(server, path)
            assert refused.status_code == 403
            assert "--profiler-dir" in refused.json()["error"]["message"]
        assert server.engine.profile_folder is None


def test_it_wants_the_key(tmp_path):
    with fake_server(profiler_dir=str(tmp_path), api_key=("secret",)) as server:
        for path in ("/start_profile", "/stop_profile"):
            assert post(server, path).status_code == 401
        assert server.engine.profile_folder is None
        assert post(server, "/start_profile", Authorization="Bearer secret").status_code == 200
