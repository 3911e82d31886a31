"""Reports for CI systems: JUnit XML, GitHub, GitLab and SARIF, of a run and of the gate."""
